//! Enums whose variants are words of reports.

/// Declares an enum with the word of each variant, as text and JSON show it.
macro_rules! words {
    ($(#[$about:meta])* pub enum $name:ident { $($(#[$each:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
        pub enum $name {
            $($(#[$each])* #[serde(rename = $word)] $variant,)+
        }

        impl $name {
            /// All variants, in order.
            pub const ALL: [$name; [$($word),+].len()] = [$($name::$variant),+];

            /// Returns the word of the variant.
            pub fn word(self) -> &'static str {
                match self { $($name::$variant => $word,)+ }
            }
        }
    };
}

pub(super) use words;
