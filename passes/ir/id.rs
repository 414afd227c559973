//! Typed ids and the tables indexed by them.
//!
//! `NodeId` and `ValueId` are different types, so one cannot be used for the other. An id is never reused, so a stale
//! id never finds another item.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// An index into an [`Arena`].
pub trait Id: Copy + Eq + Ord {
    /// Returns the id of the item at `index`.
    fn new(index: usize) -> Self;
    /// Returns the index of the item.
    fn index(self) -> usize;
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $letter:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);
        impl Id for $name {
            fn new(index: usize) -> Self {
                $name(u32::try_from(index).expect("more than 2^32 entities"))
            }
            fn index(self) -> usize {
                self.0 as usize
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($letter, "{}"), self.0)
            }
        }
    };
}

id!(/// A node of the graph. 
    NodeId, "n");
id!(/// A value of the graph. 
    ValueId, "v");

/// Owns items. Removed items leave holes.
#[derive(Clone)]
pub struct Arena<I, T> {
    items: Vec<Option<T>>,
    marker: PhantomData<I>,
}

impl<I: Id, T> Default for Arena<I, T> {
    fn default() -> Self {
        Arena {
            items: Vec::new(),
            marker: PhantomData,
        }
    }
}

impl<I: Id, T> Arena<I, T> {
    /// Appends an item and returns its id.
    pub fn push(&mut self, item: T) -> I {
        self.items.push(Some(item));
        I::new(self.items.len() - 1)
    }

    /// Returns an item, unless it was removed.
    pub fn get(&self, id: I) -> Option<&T> {
        self.items.get(id.index())?.as_ref()
    }

    /// Returns an item for change, unless it was removed.
    pub fn get_mut(&mut self, id: I) -> Option<&mut T> {
        self.items.get_mut(id.index())?.as_mut()
    }

    /// Removes an item and returns it. Its id is not used again.
    pub fn remove(&mut self, id: I) -> Option<T> {
        self.items.get_mut(id.index())?.take()
    }

    /// Returns the length of a side table: one more than the largest id so far.
    pub fn bound(&self) -> usize {
        self.items.len()
    }

    /// Returns the ids of all items.
    pub fn ids(&self) -> impl Iterator<Item = I> + '_ {
        self.items
            .iter()
            .enumerate()
            .filter(|(_, x)| x.is_some())
            .map(|(i, _)| I::new(i))
    }

    /// Returns all items with their ids.
    pub fn iter(&self) -> impl Iterator<Item = (I, &T)> {
        self.items
            .iter()
            .enumerate()
            .filter_map(|(i, x)| Some((I::new(i), x.as_ref()?)))
    }
}

impl<I: Id + fmt::Debug, T> Index<I> for Arena<I, T> {
    type Output = T;
    fn index(&self, id: I) -> &T {
        self.get(id).unwrap_or_else(|| panic!("{id:?} was removed"))
    }
}

impl<I: Id + fmt::Debug, T> IndexMut<I> for Arena<I, T> {
    fn index_mut(&mut self, id: I) -> &mut T {
        self.get_mut(id)
            .unwrap_or_else(|| panic!("{id:?} was removed"))
    }
}

/// A table with one entry for each id, the usual result of an analysis. Unknown ids have the default.
#[derive(Clone, Debug)]
pub struct SecondaryMap<I, T> {
    items: Vec<T>,
    default: T,
    marker: PhantomData<I>,
}

impl<I: Id, T: Clone> SecondaryMap<I, T> {
    /// A table of `bound` entries (see [`Arena::bound`]), all `default`.
    pub fn new(bound: usize, default: T) -> Self {
        SecondaryMap {
            items: vec![default.clone(); bound],
            default,
            marker: PhantomData,
        }
    }
}

impl<I: Id, T> Index<I> for SecondaryMap<I, T> {
    type Output = T;
    fn index(&self, id: I) -> &T {
        self.items.get(id.index()).unwrap_or(&self.default)
    }
}

impl<I: Id, T: Clone> IndexMut<I> for SecondaryMap<I, T> {
    fn index_mut(&mut self, id: I) -> &mut T {
        if id.index() >= self.items.len() {
            self.items.resize(id.index() + 1, self.default.clone());
        }
        &mut self.items[id.index()]
    }
}
