//! Properties that hold for every graph and plan, on random ones.

mod four_choices;
mod gathers;
mod graphs;
#[cfg(feature = "torch")]
mod numeric;
mod planner;
mod plans;
#[path = "../support/mod.rs"]
mod support;
