"""What a node held before: given to a new span where it is still true, and let go when nobody can need it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.manifest import Head
from atoll.node.state.anchor import AnchorState
from atoll.node.state.previous_spans import PreviousSpans
from atoll.v1 import manifest_pb2

OFFSETS = (0, 2, 3, 7, 8, 12)
LAYERS = range(len(OFFSETS) - 1)

SPANS = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda ends: range(min(ends), max(ends) + 1))


def head(versions: list[int]) -> Head:
    """Every layer at its version: the round that changed it last."""
    layers = [manifest_pb2.LayerState(layer=layer, round=versions[layer]) for layer in LAYERS]
    manifest = manifest_pb2.Manifest(layers=layers)
    manifest.round.number = max(versions)
    return Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString()))


def held(span: range, versions: list[int]) -> AnchorState:
    """The true state of these layers: every element tells its layer's version."""
    anchor_E = torch.cat([torch.full((OFFSETS[layer + 1] - OFFSETS[layer],), float(versions[layer])) for layer in span])
    state = AnchorState(anchor_E, OFFSETS, span)
    state.momentum_E = -anchor_E
    return state


def blank(span: range) -> AnchorState:
    return AnchorState(torch.full((OFFSETS[span.stop] - OFFSETS[span.start],), torch.nan), OFFSETS, span)


@given(st.lists(st.tuples(SPANS, st.sets(st.sampled_from(LAYERS))), min_size=1, max_size=6), SPANS)
def test_a_span_is_filled_with_what_is_true_and_with_nothing_else(past, wanted):
    """Spans that were held one after another, each with the layers that changed after it."""
    formers, versions, known = PreviousSpans(), [0] * len(LAYERS), set()
    for number, (span, changed) in enumerate(past, 1):
        formers.add(head(versions), held(span, versions))
        known = (known | set(span)) - changed
        for layer in changed:
            versions[layer] = number
    state = blank(wanted)
    assert formers.fill(state, head(versions)) == set(wanted) - known
    for layer in wanted:
        own = state.slice(OFFSETS[layer], OFFSETS[layer + 1])
        if layer in known:
            assert torch.equal(state.anchor_E[own], torch.full((own.stop - own.start,), float(versions[layer])))
            assert torch.equal(state.momentum_E[own], -state.anchor_E[own])
        else:
            assert state.anchor_E[own].isnan().all()


def test_it_is_let_go_once_its_other_layers_were_averaged_by_somebody_else():
    formers = PreviousSpans()
    formers.add(head([1, 1, 1, 1, 1]), held(range(3), [1] * 5))
    formers.prune(head([1, 1, 2, 2, 2]), range(2, 5))
    assert formers.held  # layers 0 and 1 are as they were: perhaps nobody else has them
    formers.prune(head([3, 1, 2, 2, 2]), range(2, 5))
    assert formers.held
    formers.prune(head([3, 4, 2, 2, 2]), range(2, 5))
    assert not formers.held


def test_without_a_head_nothing_is_true():
    formers = PreviousSpans()
    formers.add(head([1] * 5), held(range(5), [1] * 5))
    assert formers.fill(blank(range(2)), None) == {0, 1}
