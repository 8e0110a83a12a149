//! A text that grows token by token.
//!
//! The newest tokens stand in the value itself and move to the heap together: thousands of texts
//! that grow by one token a step would otherwise touch a line and a page of memory each.

const NEWEST: usize = 8;

/// Token ids in order.
#[derive(Debug, Clone)]
pub(crate) struct Text {
    older: Vec<i32>,
    newest: [i32; NEWEST],
    /// Of the newest ones, how many there are.
    count: u32,
}

impl From<Vec<i32>> for Text {
    fn from(tokens: Vec<i32>) -> Self {
        Self { older: tokens, newest: [0; NEWEST], count: 0 }
    }
}

impl Text {
    pub fn len(&self) -> usize {
        self.older.len() + self.count as usize
    }

    pub fn last(&self) -> Option<i32> {
        match self.count {
            0 => self.older.last().copied(),
            count => Some(self.newest[count as usize - 1]),
        }
    }

    pub fn push(&mut self, token: i32) {
        if self.count as usize == NEWEST {
            self.settle();
        }
        self.newest[self.count as usize] = token;
        self.count += 1;
    }

    /// Makes room for so many tokens more.
    pub fn reserve(&mut self, more: usize) {
        self.older.reserve(more + self.count as usize);
    }

    /// All of it in one piece.
    pub fn whole(&mut self) -> &[i32] {
        self.settle();
        &self.older
    }

    /// Copies the tokens from `start` on as far as `to` goes.
    pub fn copy_to(&self, start: usize, to: &mut [i32]) {
        let (in_older, in_newest) = to.split_at_mut(to.len().min(self.older.len().saturating_sub(start)));
        in_older.copy_from_slice(&self.older[start.min(self.older.len())..][..in_older.len()]);
        let first = start.saturating_sub(self.older.len());
        in_newest.copy_from_slice(&self.newest[first..][..in_newest.len()]);
    }

    /// The tokens before the `at`-th and the others.
    pub fn split(mut self, at: usize) -> (Vec<i32>, Vec<i32>) {
        self.settle();
        let rest = self.older.split_off(at);
        (self.older, rest)
    }

    fn settle(&mut self) {
        self.older.extend_from_slice(&self.newest[..self.count as usize]);
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wherever_it_is_cut_it_is_the_text_that_was_put_in() {
        for prompt in [0, 1, 5] {
            for more in [0, 1, 15, 16, 17, 40] {
                let all: Vec<i32> = (0..prompt + more).collect();
                let mut text = Text::from(all[..prompt as usize].to_vec());
                for &token in &all[prompt as usize..] {
                    text.push(token);
                    assert_eq!(text.last(), Some(token));
                }
                assert_eq!(text.len(), all.len());
                for start in 0..all.len() {
                    for end in start..=all.len() {
                        let mut copy = vec![-1; end - start];
                        text.copy_to(start, &mut copy);
                        assert_eq!(copy, all[start..end]);
                    }
                }
                assert_eq!(text.clone().whole(), all);
                let (before, after) = text.split(prompt as usize);
                assert_eq!(
                    (before, after),
                    (all[..prompt as usize].to_vec(), all[prompt as usize..].to_vec())
                );
            }
        }
    }
}
