//! Nothing but its build script: finds the libtorch in `LIBTORCH`, checks its version, and hands its folder on as
//! `DEP_CKPT_LIBTORCH_ROOT`.
//!
//! A package of its own, without dependencies, so that it is built before anything that compiles against libtorch and
//! a missing one ends the build with what to do about it, not with a missing C++ header in a dependency.
