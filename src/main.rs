//! The `ckpt-opt` command. All it does is in `cli`, and what that does is in the library.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
