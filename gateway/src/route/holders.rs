//! The workers that hold one page, in 16 bytes: one word of bits where all are among the first 64, else a small sorted
//! list while they are few, and a bit set elsewhere when they are many.

/// Numbers of workers, each a place in the pool.
#[derive(Clone, Debug)]
pub(super) enum Holders {
    /// Bit `id`.
    Low(u64),
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
        Self::Low(0)
    }
}

impl Holders {
    /// Adds a worker; false where it was there.
    pub(super) fn insert(&mut self, id: u16) -> bool {
        match self {
            Self::Low(word) if id < 64 => {
                let is_new = *word & (1 << id) == 0;
                *word |= 1 << id;
                is_new
            }
            Self::Low(word) => {
                let ids: Vec<u16> = bits(0, *word).chain([id]).collect();
                *self = Self::beyond_the_low(&ids);
                true
            }
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

    /// Some of which are not among the first 64. Ascending.
    fn beyond_the_low(ids: &[u16]) -> Self {
        if ids.len() <= FEW {
            let mut few = [0; FEW];
            few[..ids.len()].copy_from_slice(ids);
            return Self::Few { len: u8::try_from(ids.len()).unwrap_or_default(), ids: few };
        }
        let mut words = Vec::new();
        ids.iter().for_each(|&id| set(&mut words, id));
        Self::Many(Box::new(words))
    }

    /// Takes a worker away; false where it was not there.
    pub(super) fn remove(&mut self, id: u16) -> bool {
        match self {
            Self::Low(word) => {
                let was_there = id < 64 && *word & (1 << id) != 0;
                if was_there {
                    *word &= !(1 << id);
                }
                was_there
            }
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
                    let ids: Vec<u16> = self.iter().collect();
                    *self = Self::beyond_the_low(&ids);
                }
                was_there
            }
        }
    }

    /// Which of the 64 workers from `index * 64` on hold the page, a bit each.
    pub(super) fn word(&self, index: usize) -> u64 {
        match self {
            Self::Low(word) if index == 0 => *word,
            Self::Low(_) => 0,
            Self::Few { len, ids } => {
                let of_word = ids[..usize::from(*len)].iter().filter(|&&id| usize::from(id / 64) == index);
                of_word.fold(0, |word, id| word | 1 << (id % 64))
            }
            Self::Many(words) => words.get(index).copied().unwrap_or_default(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::Low(0) | Self::Few { len: 0, .. })
    }

    /// Ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        let (ids, words): (&[u16], &[u64]) = match self {
            Self::Low(word) => (&[], std::slice::from_ref(word)),
            Self::Few { len, ids } => (&ids[..usize::from(*len)], &[]),
            Self::Many(words) => (&[], words),
        };
        let in_words = words.iter().zip(0..).flat_map(|(&word, index)| bits(index, word));
        ids.iter().copied().chain(in_words)
    }

    /// Bytes outside the 16 that the page itself has.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Low(_) | Self::Few { .. } => 0,
            Self::Many(words) => size_of::<Vec<u64>>() + words.capacity() * size_of::<u64>(),
        }
    }
}

/// Ids of the bits of word `index`, ascending.
fn bits(index: u16, word: u64) -> impl Iterator<Item = u16> {
    let next = |rest: &u64| Some(rest & (rest - 1)).filter(|&rest| rest != 0);
    std::iter::successors(Some(word).filter(|&word| word != 0), next)
        .map(move |rest| index * 64 + u16::try_from(rest.trailing_zeros()).unwrap_or_default())
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
        fn holders_are_a_set(changes in prop::collection::vec((any::<bool>(), prop_oneof![0_u16..20, 0_u16..300]), 0..120)) {
            let (mut holders, mut expected) = (Holders::default(), BTreeSet::new());
            for (adds, id) in changes {
                if adds {
                    prop_assert_eq!(holders.insert(id), expected.insert(id));
                } else {
                    prop_assert_eq!(holders.remove(id), expected.remove(&id));
                }
                prop_assert_eq!(holders.iter().collect::<Vec<_>>(), expected.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(holders.is_empty(), expected.is_empty());
                for index in 0..5 {
                    let of_word = expected.iter().filter(|&&id| usize::from(id / 64) == index);
                    prop_assert_eq!(holders.word(index), of_word.fold(0, |word, id| word | 1 << (id % 64)));
                }
            }
        }
    }

    #[test]
    fn a_page_is_small() {
        assert_eq!(size_of::<Holders>(), 16);
    }
}
