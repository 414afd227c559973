//! The compiler: graph in, graph out. Pure: no I/O, no libtorch.
