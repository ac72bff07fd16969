"""Retired words stay retired: private words in names, and phrases in the docs that readers misread.

A row is `word: what to write instead`. To retire a word, remove it everywhere and add it here.
"""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

from .shipped import ROOT, documents


def _table(rows: str) -> dict[str, str]:
    return dict(row.strip().split(": ") for row in rows.replace("\n", "; ").split("; ") if row.strip())


# Parts of names: `seals` also forbids `IdentitySeals` and `seals.py`.
PARTS = _table("""
    manners: limits; wish: owner intent or objective; brought: snapshot ledger; seal: sign; seals: signatures
    obey: on_opener_message; rooms: state sources or span fit; gatherings: stripe assembler; heaps: malloc arenas
    door: stream acceptor; anatomy: module paths; unheard: screened_out or no_progress_callback; unkept: pledge failed
    parted: exchange done; applying: plan apply; fitted: wrap_for_terminal; forgiving: lossy; understudy: standby
""")
# Whole names: the words themselves are ordinary.
NAMES = _table("""
    Beside: BackgroundTasks; EarlyOpen: PendingOpens; Turns: RoundTrigger or OpenerOrder; VoteMemory: Promises
    Formers: PreviousSpans; Holdings: LayerState; Preparing: LayerPrefetcher; Ledger: FetchScheduler
    WayIn: DirectOffer; LedStage: LeaderStage; GotOn: OnProgress; LoadingAhead: TrainerPreload
    SpreadWeights: ShardedWeights; SpreadModel: FsdpModel; Authority: MembershipVerifier; Answers: ResponseTimes
    Voted: LastVote; Deny: DenyList; turn_of: fragment_of_round; cut_layers: split_into_fragments
    take_descriptors: raise_descriptor_limit; check_form: require_valid_verdicts
    stored_form: strip_unknown_manifest_fields; NotIntroduced: HelloRequired; NotFinite: WeightsNotFinite
    BaseUnusable: PretrainedWeightsUnusable
""")
PHRASES = _table(r"""
    \bwhoever\b: a node that …; \b(for|of) who\b: for the node that …; ^who (?!decides|uses|can)\w+: name the noun
    \bthat cannot be\b: name field, value and bound; \bnames nobody\b: has no subject; \bhands full\b: busy
    \bgoodbye\b: announced leave; \bway in\b: direct offer; \bdearest\b: most expensive
    \bhalf honest\b: mildly malicious; \bstray one\b: one with another corpus; \btrue bytes\b: verified bytes
    \blayer is true\b: all checksums match; \bstands there\b: is described in …; \bhung on to them\b: unknown fields
""")


@pytest.mark.parametrize("root", ["core", "node", "coordinator", "lab"])
def test_no_name_has_a_retired_word(root: str) -> None:
    found = set()
    for path in (ROOT / root / "atoll").rglob("*.py"):
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        for name in {path.stem, *(token.string for token in tokens if token.type == tokenize.NAME)}:
            parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
            instead = [PARTS[part] for part in parts & PARTS.keys()] + [NAMES[each] for each in {name} & NAMES.keys()]
            found |= {f"{path.relative_to(ROOT)}: {name}: write {word}" for word in instead}
    assert sorted(found) == []


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_retired_phrase(page: Path) -> None:
    text = page.read_text()
    assert {phrase: say for phrase, say in PHRASES.items() if re.search(phrase, text, re.I | re.M)} == {}
