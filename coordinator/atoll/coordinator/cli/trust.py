"""`atollctl trust`: proofs that members broke rules: list, show, save, verify."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.formatting import local_time
from atoll.coordinator.cli.options import CredentialsOption, RunOption
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, show, show_facts
from atoll.core.errors import AlreadyExists, InvalidRequest
from atoll.core.output import Output, OutputOption, print_to_stderr
from atoll.v1 import admin_pb2 as wire

app = typer.Typer(help="Proofs that members broke rules: list, show, verify.", no_args_is_help=True)
_COLUMNS = [
    Column("proof", "id"),
    Column("run", "run_id", drop_order=2),
    Column("member", "culprit"),
    Column("breach", "kind"),
    Column("round", "round", align_right=True),
    Column("found", "found", drop_order=1),
    Column("banned", "banned"),
]


@app.command("list")
def list_proofs(run: RunOption = "", output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """List the proofs that the coordinator has.

    [bold]Example[/bold]

      atollctl trust list
    """
    with connect(credentials) as client:
        found = client.call(client.stub.ListProofs, wire.ListProofsRequest(run_id=run)).proofs
    rows = [_row(view) for view in found]
    show(output, {"proofs": [_document(view) for view in found]}, _COLUMNS, rows)
    if not rows and output is Output.TEXT:
        print_to_stderr("nobody is proved to have broken a rule")


@app.command("show")
def show_proof(
    proof: Annotated[str, typer.Argument(metavar="PROOF", help="id of the proof, or its beginning")],
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="file for the proof, which anybody can verify")
    ] = None,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Show the content of a proof. With --save, also write the proof to a file.

    [bold]Example[/bold]

      atollctl trust show 3f9a --save reef-3.proof
    """
    with connect(credentials) as client:
        view = client.call(client.stub.GetProof, wire.GetProofRequest(id=proof))
    if save is not None:
        try:
            with save.open("xb") as file:
                file.write(view.proof)
        except FileExistsError as error:
            raise AlreadyExists(f"{save} exists", "choose another name") from error
        except OSError as error:
            raise InvalidRequest(f"{save} cannot be written: {error.strerror}") from error
        print_to_stderr(f"wrote {save}; check it with `atollctl trust verify {save}`")
    facts: list[tuple[str, object]] = [
        ("proof", view.id),
        ("member", view.culprit_name or "–"),
        ("peer id", view.culprit),
        ("run", view.run_id),
        ("breach", view.kind),
        ("what it did", view.sentence),
        ("found", local_time(view.found_unix_ms)),
        ("banned", "yes" if view.banned else "no"),
        ("bytes", len(view.proof)),
    ]
    show_facts(output, {"proof": _document(view)}, facts)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="proof that `trust show --save` wrote")],
    output: OutputOption = Output.TEXT,
) -> None:
    """Check a proof offline, without a coordinator or credential. You need not trust the author of the file.

    [bold]Example[/bold]

      atollctl trust verify reef-3.proof
    """
    from atoll.core import proofs  # imports cryptography, which other commands do without

    try:
        with file.open("rb") as opened:
            data = opened.read(proofs.MAX_PROOF_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from error
    breach = proofs.verify_proof(data)
    document = {"id": proofs.proof_id(data), **asdict(breach)}
    facts = {
        "proof": document["id"],
        "peer id": breach.culprit,
        "run": breach.run_id,
        "breach": breach.kind,
        "what it did": breach.sentence,
    }
    show_facts(output, {"breach": document}, list(facts.items()))


def _document(view: wire.ProofView) -> JsonObject:
    """Return the proof without its bytes, which `show --save` writes."""
    return {key: value for key, value in message_dict(view).items() if key != "proof"}


def _row(view: wire.ProofView) -> JsonObject:
    return {
        "id": view.id,
        "run_id": view.run_id,
        "culprit": view.culprit_name or f"…{view.culprit[-8:]}",
        "kind": view.kind,
        "round": view.round,
        "found": local_time(view.found_unix_ms),
        "banned": "yes" if view.banned else "no",
    }
