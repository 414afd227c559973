//! Indices of ops and values, and tables by them.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Index, IndexMut};

/// Declares a type for indices of one kind.
macro_rules! index {
    ($(#[$about:meta])* $name:ident) => {
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub usize);

        impl From<usize> for $name {
            fn from(index: usize) -> $name {
                $name(index)
            }
        }

        impl From<$name> for usize {
            fn from(index: $name) -> usize {
                index.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

index! {
    /// An op of a problem, by its place in the given order.
    OpIdx
}

index! {
    /// A value of a problem.
    ValueIdx
}

/// A table with one entry for each op or each value.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Table<I, T> {
    entries: Vec<T>,
    #[serde(skip)]
    by: PhantomData<I>,
}

/// A table by op.
pub type ByOp<T> = Table<OpIdx, T>;

/// A table by value.
pub type ByValue<T> = Table<ValueIdx, T>;

impl<I: From<usize>, T> Table<I, T> {
    /// Returns a table with the same entry everywhere.
    pub fn filled(entry: T, len: usize) -> Table<I, T>
    where
        T: Clone,
    {
        vec![entry; len].into()
    }

    /// Returns all indices, in order.
    pub fn indices(&self) -> impl DoubleEndedIterator<Item = I> + use<I, T> {
        (0..self.entries.len()).map(I::from)
    }

    /// Returns all entries with their indices, in order.
    pub fn enumerated(&self) -> impl DoubleEndedIterator<Item = (I, &T)> {
        self.entries
            .iter()
            .enumerate()
            .map(|(i, e)| (I::from(i), e))
    }

    /// Adds an entry and returns its index.
    pub fn push(&mut self, entry: T) -> I {
        self.entries.push(entry);
        I::from(self.entries.len() - 1)
    }
}

impl<I: Into<usize>, T> Table<I, T> {
    /// Returns the entry at an index, if there is one.
    pub fn at(&self, index: I) -> Option<&T> {
        self.entries.get(index.into())
    }
}

impl<I, T> From<Vec<T>> for Table<I, T> {
    fn from(entries: Vec<T>) -> Table<I, T> {
        let by = PhantomData;
        Table { entries, by }
    }
}

impl<I, T> FromIterator<T> for Table<I, T> {
    fn from_iter<Iter: IntoIterator<Item = T>>(entries: Iter) -> Table<I, T> {
        entries.into_iter().collect::<Vec<T>>().into()
    }
}

impl<I, T> IntoIterator for Table<I, T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

impl<'a, I, T> IntoIterator for &'a Table<I, T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.iter()
    }
}

impl<'a, I, T> IntoIterator for &'a mut Table<I, T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.iter_mut()
    }
}

impl<I, T> Default for Table<I, T> {
    fn default() -> Table<I, T> {
        Vec::new().into()
    }
}

impl<I, T: fmt::Debug> fmt::Debug for Table<I, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.entries.fmt(f)
    }
}

impl<I, T> Deref for Table<I, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.entries
    }
}

impl<I, T> DerefMut for Table<I, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.entries
    }
}

impl<I: Into<usize>, T> Index<I> for Table<I, T> {
    type Output = T;

    fn index(&self, index: I) -> &T {
        &self.entries[index.into()]
    }
}

impl<I: Into<usize>, T> IndexMut<I> for Table<I, T> {
    fn index_mut(&mut self, index: I) -> &mut T {
        &mut self.entries[index.into()]
    }
}
