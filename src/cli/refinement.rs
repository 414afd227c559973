//! The options that refine a policy. They are read together, because overrides win in the order they were given.

use ckpt_passes::plan::overrides::{NamePattern, Override, Target};
use ckpt_passes::plan::{Constraint, PolicyOverrides};
use clap::{ArgMatches, Args, Command, FromArgMatches};

/// As the command line has them.
#[derive(Args)]
#[command(next_help_heading = "Which layers and ops")]
struct Given {
    /// Apply the policy to the modules of this class (LlamaMLP) or path (layers.*.mlp) instead of to the layers that
    /// the dataflow shows
    #[arg(long, value_name = "CLASS_OR_PATTERN", value_delimiter = ',', value_parser = name)]
    layers: Vec<NamePattern>,
    /// Apply it only inside modules whose path or class matches, and to nodes whose name matches
    #[arg(long, value_name = "PATTERN", value_delimiter = ',', value_parser = name)]
    scope: Vec<NamePattern>,
    /// Apply it to every N-th of the layers only
    #[arg(long, value_name = "N", value_parser = count)]
    every: Option<usize>,
    /// Apply it to the first N of the layers only
    #[arg(long, value_name = "N", value_parser = count)]
    first: Option<usize>,
    /// Keep the results of these ops: MatMul, aten.mm, torch.ops.aten.mm.default, or a pattern of node names
    #[arg(long, value_name = "OP,OP,…", value_delimiter = ',', value_parser = op)]
    save_ops: Vec<Target>,
    /// Compute these ops again; of several options about an op the last wins
    #[arg(long, value_name = "OP,OP,…", value_delimiter = ',', value_parser = op)]
    recompute_ops: Vec<Target>,
    /// Compute exactly the nodes again that are in such a module or have such a name: layers.*.moe.router
    #[arg(long, value_name = "PATH,PATH,…", value_delimiter = ',', value_parser = module)]
    recompute: Vec<Target>,
}

/// What the user overrides beside the policy.
pub struct Refinement(PolicyOverrides);

impl Refinement {
    pub fn overrides(&self) -> PolicyOverrides {
        self.0.clone()
    }
}

impl Args for Refinement {
    fn augment_args(cmd: Command) -> Command {
        Given::augment_args(cmd)
    }
    fn augment_args_for_update(cmd: Command) -> Command {
        Given::augment_args_for_update(cmd)
    }
}

impl FromArgMatches for Refinement {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Refinement, clap::Error> {
        let given = Given::from_arg_matches(matches)?;
        let mut overrides: Vec<(usize, Override)> = Vec::new();
        for (id, choice, targets) in [
            ("save_ops", Constraint::Keep, given.save_ops),
            ("recompute_ops", Constraint::Recompute, given.recompute_ops),
            ("recompute", Constraint::Recompute, given.recompute),
        ] {
            let places = matches.indices_of(id).into_iter().flatten();
            let given = targets
                .into_iter()
                .map(|target| Override { choice, target });
            overrides.extend(places.zip(given));
        }
        overrides.sort_by_key(|(place, _)| *place);
        Ok(Refinement(PolicyOverrides {
            layers: given.layers,
            scope: given.scope,
            every: given.every,
            first: given.first,
            overrides: overrides.into_iter().map(|(_, rule)| rule).collect(),
        }))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Refinement::from_arg_matches(matches)?;
        Ok(())
    }
}

fn name(text: &str) -> Result<NamePattern, String> {
    NamePattern::parse(text).map_err(super::args::shown)
}

fn op(text: &str) -> Result<Target, String> {
    Target::op(text).map_err(super::args::shown)
}

fn module(text: &str) -> Result<Target, String> {
    Target::module(text).map_err(super::args::shown)
}

fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a number of layers, 1 or more".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overrides(words: &[&str]) -> String {
        let command = Refinement::augment_args(Command::new("x").no_binary_name(true));
        let matches = command.try_get_matches_from(words).unwrap();
        Refinement::from_arg_matches(&matches)
            .unwrap()
            .overrides()
            .to_string()
    }

    #[test]
    fn overrides_keep_the_order_of_the_command_line() {
        let words = [
            "--recompute-ops",
            "Gelu,aten.mm.default",
            "--save-ops=MatMul",
            "--recompute",
            "layers.*.mlp",
            "--save-ops",
            "Gelu",
            "--every",
            "2",
            "--layers",
            "A,B",
        ];
        assert_eq!(
            overrides(&words),
            "--layers A --layers B --every 2 --recompute-ops Gelu --recompute-ops aten.mm.default --save-ops MatMul \
             --recompute layers.*.mlp --save-ops Gelu"
        );
        assert_eq!(overrides(&[]), "");
    }
}
