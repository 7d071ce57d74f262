//! The workers that hold one page: a small sorted list while they are few, a bit set when they are many. 16 bytes.

/// Numbers of workers, each a place in the pool.
#[derive(Clone, Debug)]
pub(super) enum Holders {
    Few {
        len: u8,
        /// Ascending; the rest is 0.
        ids: [u16; FEW],
    },
    /// Bit `id % 64` of word `id / 64`. Boxed twice over, since most pages never come here and a page must stay small.
    #[expect(clippy::box_collection, reason = "a thin pointer keeps the page at 16 bytes")]
    Many(Box<Vec<u64>>),
}

const FEW: usize = 6;

impl Default for Holders {
    fn default() -> Self {
        Self::Few { len: 0, ids: [0; FEW] }
    }
}

impl Holders {
    /// Adds a worker; false where it was there.
    pub(super) fn insert(&mut self, id: u16) -> bool {
        match self {
            Self::Few { len, ids } => {
                let used = usize::from(*len);
                let Err(place) = ids[..used].binary_search(&id) else { return false };
                if used == FEW {
                    let mut words = Vec::new();
                    ids.iter().chain([&id]).for_each(|&id| set(&mut words, id));
                    *self = Self::Many(Box::new(words));
                } else {
                    ids.copy_within(place..used, place + 1);
                    ids[place] = id;
                    *len += 1;
                }
                true
            }
            Self::Many(words) => {
                let is_new = !has(words, id);
                set(words, id);
                is_new
            }
        }
    }

    /// Takes a worker away; false where it was not there.
    pub(super) fn remove(&mut self, id: u16) -> bool {
        match self {
            Self::Few { len, ids } => {
                let used = usize::from(*len);
                let Ok(place) = ids[..used].binary_search(&id) else { return false };
                ids.copy_within(place + 1..used, place);
                ids[used - 1] = 0;
                *len -= 1;
                true
            }
            Self::Many(words) => {
                let was_there = has(words, id);
                if was_there {
                    words[usize::from(id / 64)] &= !(1 << (id % 64));
                }
                if words.iter().map(|word| word.count_ones()).sum::<u32>() as usize <= FEW / 2 {
                    let mut few = Self::default();
                    self.iter().for_each(|id| _ = few.insert(id));
                    *self = few;
                }
                was_there
            }
        }
    }

    pub(super) fn contains(&self, id: u16) -> bool {
        match self {
            Self::Few { len, ids } => ids[..usize::from(*len)].contains(&id),
            Self::Many(words) => has(words, id),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::Few { len: 0, .. })
    }

    /// Ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        let (ids, words): (&[u16], &[u64]) = match self {
            Self::Few { len, ids } => (&ids[..usize::from(*len)], &[]),
            Self::Many(words) => (&[], words),
        };
        let in_words = words.iter().zip(0..).flat_map(|(&word, index)| {
            let next = |rest: &u64| Some(rest & (rest - 1)).filter(|&rest| rest != 0);
            std::iter::successors(Some(word).filter(|&word| word != 0), next)
                .map(move |rest| index * 64 + u16::try_from(rest.trailing_zeros()).unwrap_or_default())
        });
        ids.iter().copied().chain(in_words)
    }

    /// Bytes outside the 16 that the page itself has.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Few { .. } => 0,
            Self::Many(words) => size_of::<Vec<u64>>() + words.capacity() * size_of::<u64>(),
        }
    }
}

impl PartialEq for Holders {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Few { len, ids }, Self::Few { len: other_len, ids: other_ids }) => {
                len == other_len && ids == other_ids
            }
            _ => self.iter().eq(other.iter()),
        }
    }
}

fn has(words: &[u64], id: u16) -> bool {
    words.get(usize::from(id / 64)).is_some_and(|word| word & (1 << (id % 64)) != 0)
}

fn set(words: &mut Vec<u64>, id: u16) {
    let index = usize::from(id / 64);
    if words.len() <= index {
        words.resize(index + 1, 0);
    }
    words[index] |= 1 << (id % 64);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::Holders;

    proptest! {
        #[test]
        fn holders_are_a_set(changes in prop::collection::vec((any::<bool>(), 0_u16..300), 0..120)) {
            let (mut holders, mut expected) = (Holders::default(), BTreeSet::new());
            for (adds, id) in changes {
                if adds {
                    prop_assert_eq!(holders.insert(id), expected.insert(id));
                } else {
                    prop_assert_eq!(holders.remove(id), expected.remove(&id));
                }
                prop_assert_eq!(holders.iter().collect::<Vec<_>>(), expected.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(holders.is_empty(), expected.is_empty());
                prop_assert_eq!(holders.contains(id), expected.contains(&id));
                let mut anew = Holders::default();
                expected.iter().rev().for_each(|&id| _ = anew.insert(id));
                prop_assert!(anew == holders);
            }
        }
    }

    #[test]
    fn a_page_is_small() {
        assert_eq!(size_of::<Holders>(), 16);
    }
}
