import numpy as np
import pytest

from mmrl.ops import branching
from mmrl.types import BranchedRows


def rows(*pairs):
    parents, shared = zip(*pairs, strict=True)
    return BranchedRows(np.array(parents, np.int64), np.array(shared, np.int64))


def test_a_tree_by_hand():
    """Row 0 is 5 tokens; row 1 leaves it after 3, row 2 leaves row 1 after 2, row 3 leaves row 1 after 4 of its 6; row
    4 begins anew, and row 5 leaves it at once."""
    tree = rows((-1, 0), (0, 3), (1, 2), (1, 4), (-1, 0), (4, 0))
    lengths = [5, 6, 4, 5, 2, 3]
    assert branching.roots(tree).tolist() == [0, 0, 0, 0, 4, 5]
    assert [found.tolist() for found in branching.sharers(tree, lengths)] == [
        [4, 4, 3, 1, 1],
        [4, 4, 3, 2, 1, 1],
        [4, 4, 1, 1],
        [4, 4, 3, 2, 1],
        [1, 1],
        [1, 1, 1],
    ]
    values, valid = np.array([1.0, 2.0, 4.0, np.nan, 5.0, 6.0]), np.array([1, 1, 1, 0, 1, 1], np.bool_)
    means = branching.means_over_sharers(tree, values, lengths, valid)
    np.testing.assert_allclose(means[3], [7 / 3, 7 / 3, 1.5, 2.0, 0.0])
    np.testing.assert_allclose(means[0], [7 / 3, 7 / 3, 1.5, 1.0, 1.0])
    np.testing.assert_allclose(means[5], [6.0, 6.0, 6.0])


@pytest.mark.parametrize("seed", range(5))
def test_any_tree_is_what_its_tokens_say(seed):
    """Each new token has an id of its own, so that two rows share a token exactly where they have its id."""
    rng, new, tokens, pairs = np.random.default_rng(seed), iter(range(10**6)), [], []
    for row in range(40):
        parent = int(rng.integers(-1, row)) if row else -1
        shared = 0 if parent < 0 else int(rng.integers(0, len(tokens[parent]) + 1))
        own = [next(new) for _ in range(int(rng.integers(0, 6)))]
        tokens.append((tokens[parent][:shared] if parent >= 0 else []) + own)
        pairs.append((parent, shared))
    values, lengths = rng.normal(size=40), list(map(len, tokens))
    sums = branching.sums_over_sharers(rows(*pairs), values, lengths)
    for own, found in zip(tokens, sums, strict=True):
        expected = [sum(v for v, other in zip(values, tokens, strict=True) if token in other) for token in own]
        np.testing.assert_allclose(found, expected, atol=1e-12)
