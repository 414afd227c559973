//! The bindings to libtorch: any op by its schema, exact live bytes, raw bytes, products and generators.

mod bytes;
mod graph;
mod memory;
mod op;
mod product;
mod rng;
