//! Keys of the prefix cache: a chain of keyed hashes over match units, from a root that tells salt and adapter apart.
//!
//! A key only leads to an entry; what is shared is decided by comparing tokens. The key of a unit hashes its tokens under
//! the key before it and a secret of the engine: two compressions for 32 tokens.

use crate::config::EngineConfig;
use crate::group::Reach;

/// The name of a prefix: of all tokens up to the end of a match unit, and of the root.
pub(crate) type Key = u128;

/// Bits of a key.
pub const KEY_BITS: u32 = Key::BITS;

/// Makes keys. Engines of the same config make the same keys, in whatever process.
#[derive(Debug, Clone)]
pub(crate) struct PrefixHasher {
    secret: [u8; 32],
    match_unit: usize,
    mask: Key,
}

impl PrefixHasher {
    pub fn new(config: &EngineConfig) -> Self {
        let mut material = blake3::Hasher::new_derive_key("chairlift prefix cache");
        material.update(&config.seed.to_le_bytes());
        material.update(&config.page_size.to_le_bytes());
        material.update(&config.match_unit.to_le_bytes());
        for reach in &config.groups {
            let (form, tokens) = match *reach {
                Reach::Full => (0, 0),
                Reach::Window(tokens) => (1, tokens),
                Reach::Chunk(tokens) => (2_u32, tokens),
            };
            material.update(&form.to_le_bytes());
            material.update(&tokens.to_le_bytes());
        }
        let mask = Key::MAX.checked_shr(KEY_BITS - config.hash_bits).unwrap_or(0);
        Self { secret: material.finalize().into(), match_unit: config.match_unit as usize, mask }
    }

    /// Where chains of one salt and one adapter start. Never shortened: no token tells roots apart.
    pub fn root(&self, salt: &str, adapter: &str) -> Key {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        // With its length before it, no part can be taken for the other.
        for part in [salt, adapter] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        short(&hasher)
    }

    /// The root of the same salt and adapter in the second regime.
    pub fn second_regime(&self, root: Key) -> Key {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        hasher.update(b"second regime");
        hasher.update(&root.to_le_bytes());
        short(&hasher)
    }

    /// The key of a match unit that follows another, or the root.
    pub fn next(&self, before: Key, tokens: &[i32]) -> Key {
        debug_assert_eq!(tokens.len(), self.match_unit);
        let mut secret = self.secret;
        secret[..16].copy_from_slice(&before.to_le_bytes());
        let mut hasher = blake3::Hasher::new_keyed(&secret);
        let mut bytes = [0; 4 * 32];
        for part in tokens.chunks(32) {
            for (token, place) in part.iter().zip(bytes.chunks_exact_mut(4)) {
                place.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..4 * part.len()]);
        }
        short(&hasher) & self.mask
    }

    /// The keys of all whole match units of a text.
    pub fn chain(&self, root: Key, tokens: &[i32]) -> Vec<Key> {
        let mut keys = Vec::new();
        if self.match_unit > 0 {
            self.extend(root, &mut keys, tokens);
        }
        keys
    }

    /// Adds the keys that are missing for all whole match units of a text.
    pub fn extend(&self, root: Key, keys: &mut Vec<Key>, tokens: &[i32]) {
        keys.reserve_exact((tokens.len() / self.match_unit).saturating_sub(keys.len()));
        for unit in tokens.chunks_exact(self.match_unit).skip(keys.len()) {
            let before = keys.last().copied().unwrap_or(root);
            keys.push(self.next(before, unit));
        }
    }
}

fn short(hasher: &blake3::Hasher) -> Key {
    let hash = hasher.finalize();
    let (low, _) = hash.as_bytes().split_at(16);
    low.iter().rev().fold(0, |key, &byte| key << 8 | Key::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hasher(seed: u64) -> PrefixHasher {
        PrefixHasher::new(&EngineConfig { page_size: 8, match_unit: 4, seed, ..EngineConfig::default() })
    }

    #[test]
    fn the_same_text_has_the_same_keys_in_every_engine_of_a_config() {
        let text: Vec<i32> = (0..11).collect();
        let (one, other) = (hasher(1), hasher(1));
        assert_eq!(one.chain(one.root("", ""), &text), other.chain(other.root("", ""), &text));
        assert_ne!(one.root("", ""), hasher(2).root("", ""));
        assert_eq!(one.chain(0, &text).len(), 2);
    }

    #[test]
    fn salt_and_adapter_have_places_of_their_own() {
        let hasher = hasher(1);
        let roots = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("aa", ""), ("", "aa")];
        let keys: std::collections::HashSet<Key> =
            roots.iter().map(|(salt, adapter)| hasher.root(salt, adapter)).collect();
        assert_eq!(keys.len(), roots.len());
    }

    #[test]
    fn a_key_depends_on_every_token_before_it() {
        let hasher = hasher(1);
        let text: Vec<i32> = (0..12).collect();
        let keys = hasher.chain(7, &text);
        for changed in 0..12 {
            let mut other = text.clone();
            other[changed] += 1;
            let others = hasher.chain(7, &other);
            for unit in 0..3 {
                assert_eq!(keys[unit] == others[unit], changed / 4 > unit);
            }
        }
    }
}
