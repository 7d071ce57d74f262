//! Names the pages of a prompt as workers name them, so that their events can be compared with a prompt.
//!
//! A page is named by the hash of its tokens and of everything before it: `H(parent, H(tokens))`, where `H` is XXH3-64
//! over little-endian bytes and the parent of a prompt's first page is the hash of the tenant's salt. `worker.proto`
//! states the same beside `KvStored`; the worker's side is `cache/events.py`.

use xxhash_rust::xxh3::xxh3_64;

/// The names of all whole pages of `prompt`, first to last. A partly filled last page has none.
#[must_use]
pub fn page_hashes(prompt: &[u32], cache_salt: &str, page_size_tokens: usize) -> Vec<u64> {
    page_names(prompt, cache_salt, page_size_tokens).collect()
}

/// The same, each when it is asked for.
pub fn page_names(prompt: &[u32], cache_salt: &str, page_size_tokens: usize) -> impl Iterator<Item = u64> {
    let mut parent = xxh3_64(cache_salt.as_bytes());
    let mut bytes = vec![0; page_size_tokens * size_of::<u32>()];
    let name = move |page: &[u32]| {
        let (places, _) = bytes.as_chunks_mut();
        places.iter_mut().zip(page).for_each(|(place, token)| *place = token.to_le_bytes());
        parent = child_hash(parent, xxh3_64(&bytes));
        parent
    };
    prompt.chunks_exact(page_size_tokens.max(1)).map(name)
}

fn child_hash(parent: u64, tokens: u64) -> u64 {
    let mut both = [0; 16];
    both[..8].copy_from_slice(&parent.to_le_bytes());
    both[8..].copy_from_slice(&tokens.to_le_bytes());
    xxh3_64(&both)
}

#[cfg(test)]
mod tests {
    use super::page_hashes;

    /// The worker's tests hold the same values (`test_events.py`): either side that drifts turns red.
    #[test]
    fn both_sides_of_the_contract_name_pages_alike() {
        let prompt: Vec<u32> = (0..8).collect();
        assert_eq!(page_hashes(&prompt, "", 4), [11_484_953_719_668_697_759, 10_900_368_067_859_109_240]);
        assert_eq!(page_hashes(&prompt, "tenant", 4), [14_685_567_996_632_012_903, 17_008_068_419_418_477_220]);
    }

    #[test]
    fn a_page_is_named_by_all_before_it_and_by_its_tenant() {
        let first = page_hashes(&[1, 2, 3, 4], "", 2);
        assert_ne!(first[0], first[1]);
        assert_ne!(page_hashes(&[3, 4], "", 2)[0], first[1]);
        assert_ne!(page_hashes(&[1, 2, 3, 4], "tenant", 2)[0], first[0]);
        assert_eq!(page_hashes(&[1, 2, 9], "", 2), first[..1]);
    }
}
