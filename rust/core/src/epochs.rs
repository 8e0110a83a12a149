//! Which version of the weights chose which of a sequence's tokens.

/// Versions of the weights in the order in which they chose tokens, each with the place of the first token that it chose
/// or is to choose.
#[derive(Debug)]
pub(crate) struct TokenEpochs {
    first: u64,
    /// Places rise, from 1 on. Nothing is allocated until weights change.
    later: Vec<(u32, u64)>,
}

impl TokenEpochs {
    pub fn new(epoch: u64) -> Self {
        Self { first: epoch, later: Vec::new() }
    }

    /// Tokens after the first `sampled` are chosen by other weights.
    pub fn changed(&mut self, sampled: u32, epoch: u64) {
        self.forget_from(sampled);
        self.push(sampled, epoch);
    }

    /// Only `sampled` tokens were chosen after all: those that follow are chosen by the newest weights.
    pub fn sampled_so_far(&mut self, sampled: u32) {
        if let Some(&(place, newest)) = self.later.last()
            && place > sampled
        {
            self.changed(sampled, newest);
        }
    }

    /// The versions that chose the first `tokens`, and the places of their first ones.
    pub fn of(&self, tokens: usize) -> Vec<(u32, u64)> {
        let all = std::iter::once((0, self.first)).chain(self.later.iter().copied());
        all.take_while(|&(place, _)| (place as usize) < tokens).collect()
    }

    fn forget_from(&mut self, place: u32) {
        self.later.retain(|&(of, _)| of < place);
    }

    fn push(&mut self, place: u32, epoch: u64) {
        if place == 0 {
            self.first = epoch;
        } else {
            self.later.push((place, epoch));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_that_chose_no_token_is_not_told() {
        let mut epochs = TokenEpochs::new(2);
        assert_eq!(epochs.of(0), []);
        epochs.changed(0, 3);
        assert_eq!(epochs.of(1), [(0, 3)]);
        epochs.changed(4, 4);
        epochs.changed(4, 5);
        assert_eq!(epochs.of(4), [(0, 3)]);
        assert_eq!(epochs.of(6), [(0, 3), (4, 5)]);
    }

    #[test]
    fn tokens_that_were_not_chosen_after_all_are_the_newest_weights() {
        let mut epochs = TokenEpochs::new(0);
        epochs.changed(3, 1);
        epochs.changed(5, 2);
        epochs.sampled_so_far(5);
        assert_eq!(epochs.of(9), [(0, 0), (3, 1), (5, 2)]);
        epochs.sampled_so_far(2);
        assert_eq!(epochs.of(9), [(0, 0), (2, 2)]);
        epochs.sampled_so_far(0);
        assert_eq!(epochs.of(9), [(0, 2)]);
    }
}
