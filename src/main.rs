//! The `ckpt-opt` command; see `cli`.

mod cli;

fn main() {
    cli::main()
}
