//! Options that override a policy. They are read together, because later options win.

use super::parse::{by, count};
use ckpt_passes::plan::Constraint;
use ckpt_passes::planning::overrides::{NamePattern, Override, PolicyOverrides, Target};
use clap::{ArgMatches, Args, Command, FromArgMatches};

/// The options as clap reads them.
#[derive(Args)]
#[command(next_help_heading = "Overrides: which layers and ops")]
struct Given {
    /// Apply the policy to modules of this class (LlamaMLP) or path (layers.*.mlp) instead of to the layers found in the
    /// dataflow
    #[arg(long, value_name = "CLASS_OR_PATTERN", value_delimiter = ',', value_parser = by(NamePattern::parse))]
    layers: Vec<NamePattern>,
    /// Apply the policy only inside modules whose path or class matches, and to nodes whose name matches
    #[arg(long, value_name = "PATTERN", value_delimiter = ',', value_parser = by(NamePattern::parse))]
    scope: Vec<NamePattern>,
    /// Apply the policy to every N-th layer only
    #[arg(long, value_name = "N", value_parser = count)]
    every: Option<usize>,
    /// Apply the policy to the first N layers only
    #[arg(long, value_name = "N", value_parser = count)]
    first: Option<usize>,
    /// Keep the results of these ops: MatMul, aten.mm, torch.ops.aten.mm.default, or a pattern of node names
    #[arg(long, value_name = "OP,OP,…", value_delimiter = ',', value_parser = by(Target::op))]
    save_ops: Vec<Target>,
    /// Recompute the results of these ops; of several options about an op the last wins
    #[arg(long, value_name = "OP,OP,…", value_delimiter = ',', value_parser = by(Target::op))]
    recompute_ops: Vec<Target>,
    /// Recompute exactly the nodes that are in such a module or have such a name: layers.*.moe.router
    #[arg(long, value_name = "PATH,PATH,…", value_delimiter = ',', value_parser = by(Target::module))]
    recompute: Vec<Target>,
}

/// The overrides of one command line, in the order they were given.
pub struct Overrides(pub PolicyOverrides);

impl Args for Overrides {
    fn augment_args(cmd: Command) -> Command {
        Given::augment_args(cmd)
    }
    fn augment_args_for_update(cmd: Command) -> Command {
        Given::augment_args_for_update(cmd)
    }
}

impl FromArgMatches for Overrides {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Overrides, clap::Error> {
        let given = Given::from_arg_matches(matches)?;
        let mut overrides: Vec<(usize, Override)> = Vec::new();
        for (id, constraint, targets) in [
            ("save_ops", Constraint::Keep, given.save_ops),
            ("recompute_ops", Constraint::Recompute, given.recompute_ops),
            ("recompute", Constraint::Recompute, given.recompute),
        ] {
            let places = matches.indices_of(id).into_iter().flatten();
            let given = targets
                .into_iter()
                .map(|target| Override { constraint, target });
            overrides.extend(places.zip(given));
        }
        overrides.sort_by_key(|(place, _)| *place);
        Ok(Overrides(PolicyOverrides {
            layers: given.layers,
            scope: given.scope,
            every: given.every,
            first: given.first,
            overrides: overrides.into_iter().map(|(_, rule)| rule).collect(),
        }))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Overrides::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overrides(words: &[&str]) -> String {
        let command = Overrides::augment_args(Command::new("x").no_binary_name(true));
        let matches = command.try_get_matches_from(words).unwrap();
        let Overrides(overrides) = Overrides::from_arg_matches(&matches).unwrap();
        overrides.to_string()
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
