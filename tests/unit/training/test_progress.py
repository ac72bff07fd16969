"""Counters of training that no round has counted, with fragments that may be cut differently from round to round."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.training.progress import Progress
from atoll.node.training.sample_feed import SampleNumbers

STEP = 10  # tokens
ELEMENTS = 12

ACTIONS = st.lists(
    st.one_of(
        st.just("step"),
        st.tuples(st.integers(0, ELEMENTS - 1), st.integers(1, ELEMENTS), st.booleans()),
    ),
    max_size=40,
)


def trained(steps: int) -> Progress:
    progress = Progress()
    for _ in range(steps):
        progress.add(STEP, SampleNumbers((1,), 1))
    return progress


@given(ACTIONS)
def test_no_token_counts_twice_for_an_element_however_fragments_are_cut(actions):
    progress, counted = Progress(), [0] * ELEMENTS
    for action in actions:
        if action == "step":
            progress.add(STEP, SampleNumbers((1,), 1))
            continue
        start, length, commits = action
        end = min(ELEMENTS, start + length)
        taken = progress.mark_snapshot(start, end)
        assert taken.fragment_tokens <= min(progress.tokens_total - count for count in counted[start:end])
        if commits:
            progress.commit_snapshot()
            counted[start:end] = [progress.tokens_total] * (end - start)
        else:
            progress.discard_snapshot()
    assert progress.tokens <= progress.tokens_total


def test_a_fragment_counts_what_was_trained_since_its_own_last_round():
    progress = trained(4)
    assert progress.mark_snapshot(0, 6).fragment_tokens == 4 * STEP
    progress.commit_snapshot()
    progress.add(STEP, SampleNumbers((1,), 1))
    assert progress.mark_snapshot(6, 12).fragment_tokens == 5 * STEP
    progress.commit_snapshot()
    progress.add(STEP, SampleNumbers((1,), 1))
    assert progress.mark_snapshot(0, 6).fragment_tokens == 2 * STEP


def test_a_fragment_that_is_split_keeps_its_count():
    progress = trained(4)
    progress.mark_snapshot(0, 12)
    progress.commit_snapshot()
    progress.add(STEP, SampleNumbers((1,), 1))
    assert progress.mark_snapshot(0, 4).fragment_tokens == STEP
    progress.commit_snapshot()
    progress.add(STEP, SampleNumbers((1,), 1))
    assert progress.mark_snapshot(4, 12).fragment_tokens == 2 * STEP
    assert progress.mark_snapshot(0, 12).fragment_tokens == STEP  # of some elements the step before is counted
