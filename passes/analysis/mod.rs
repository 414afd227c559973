//! `&Graph` to a table: what is true of a graph, never stored in it.

pub mod params;
