"""``pagedcore replay``: a recording taken again, under other settings, or one of its points with the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from pagedcore.cli import common
from pagedcore.errors import InvalidConfig, RecordingError

if TYPE_CHECKING:
    from pagedcore.analysis.recorder.recording import Recording


def replay(
    file: Annotated[Path, typer.Argument(help="What Engine.dump_recording wrote.")],
    policy: Annotated[str | None, typer.Option(help="Another scheduling policy, to compare.")] = None,
    num_kv_blocks: Annotated[int | None, typer.Option(min=1, help="Another number of KV blocks, to compare.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Another max_num_seqs, to compare.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Another token budget of a step, to compare.")
    ] = None,
    request: Annotated[str | None, typer.Option(help="A request's id, or how it begins: compute one point.")] = None,
    completion: Annotated[int, typer.Option(help="Of several completions of the request, which one.")] = 0,
    token: Annotated[int, typer.Option(help="Which of its generated tokens, from 0.")] = 0,
    model: Annotated[str, typer.Option("--model", "-m", help="The model that it was recorded with.")] = "demo",
    top: Annotated[int, typer.Option(min=1, max=20, help="How many alternatives to show.")] = 10,
    force: Annotated[int | None, typer.Option(help="A token id to put there instead.")] = None,
    num_continue: Annotated[int, typer.Option("--continue", min=1, help="Tokens to generate behind it.")] = 20,
) -> None:
    """Take a recording's decisions again and compare them; or show what other settings, or another token, change."""
    from pagedcore.analysis.recorder.recording import read_recording

    try:
        recording = read_recording(file)
    except OSError as error:
        raise RecordingError(f"the file cannot be read ({type(error).__name__})") from None
    if request is not None:
        _show_point(recording, request, completion, token, model, top, force, num_continue)
        return
    changes = {"policy": policy, "num_blocks": num_kv_blocks, "max_num_seqs": max_num_seqs,
               "max_num_batched_tokens": max_num_batched_tokens}
    given = {name: value for name, value in changes.items() if value is not None}
    if given:
        _show_what_if(recording, given)
    else:
        _show_replay(recording)


def _show_replay(recording: Recording) -> None:
    from pagedcore.analysis.replay.decisions import replay_decisions

    replayed = replay_decisions(recording)
    seen = f"{replayed.num_steps} steps and {replayed.num_decisions} decisions"
    if (found := replayed.difference) is None:
        common.console().print(f"{seen} are equal to the recorded ones, byte by byte")
        return
    common.console().print(f"after {seen}, segment {found.segment}, event {found.event} ({found.verb}) differs:")
    common.console().print(f"recorded  {found.recorded[:500]}\nreplayed  {found.replayed[:500]}", markup=False)
    raise typer.Exit(1)


def _show_what_if(recording: Recording, changes: dict[str, Any]) -> None:
    from pagedcore.analysis.replay import what_if

    if not recording.segments:
        raise RecordingError("it has no steps")
    settings = {**recording.segments[0]["settings"], **changes}
    if settings["max_num_batched_tokens"] < settings["max_num_seqs"]:
        raise InvalidConfig("max_num_batched_tokens: allowed is at least max_num_seqs, so that every row can advance.")
    found = what_if.compare(recording, changes)
    for made in found.starting_states:
        if made.num_preempted or made.num_evicted or made.refused:
            common.console().print(
                f"to begin with, {made.num_preempted} sequences are preempted, {made.num_evicted} cached blocks "
                f"evicted, and {len(made.refused)} sequences refused as too long for the pool")
    if found.left_at is None:
        common.console().print(f"all decisions of {found.num_equal_steps} steps are the recorded ones")
    else:
        common.console().print(f"the first other decision comes after {found.num_equal_steps} steps")
    recorded, modelled, changed = found.recorded, found.modelled, found.changed
    table = Table("", "recorded", "modelled", ", ".join(f"{name} {value}" for name, value in changes.items()))
    rows = [
        ("steps", *(f"{one.num_steps}" for one in (recorded, modelled, changed))),
        ("estimated time", *(f"{one.seconds:.3f} s" for one in (recorded, modelled, changed))),
        ("mean wait", *(f"{one.mean_wait_s:.3f} s" for one in (recorded, modelled, changed))),
        ("longest wait", *(f"{one.longest_wait_s:.3f} s" for one in (recorded, modelled, changed))),
        ("preemptions", *(f"{one.num_preemptions}" for one in (recorded, modelled, changed))),
        ("refused", *(f"{one.num_refused}" for one in (recorded, modelled, changed))),
        ("finished", *(f"{len(one.finished)}" for one in (recorded, modelled, changed))),
        ("other place in finish order", "", f"{what_if.changed_order(recorded, modelled)}",
         f"{what_if.changed_order(modelled, changed)}"),
    ]
    for row in rows:
        table.add_row(*row)
    common.console().print(table)
    common.console().print('"modelled": recorded settings, on the virtual clock from the same step on; compare with it')


def _show_point(
    recording: Recording, request: str, completion: int, token: int, model: str, top: int, force: int | None,
    num_continue: int,
) -> None:
    from pagedcore.analysis.replay import point as points

    point = points.find_point(recording, request, token, completion)
    settings = points.settings_for(recording, len(point.token_ids) + 1 + num_continue)
    with common.open_engine(model, **settings) as engine:
        points.require_equal(recording, engine, point)
        computed = points.compute_point(engine, point, top)
        table = Table("token", "text", "log-probability", "")
        for token_id, logprob in computed.top:
            marks = [name for name, one in (("recorded", point.token_id), ("chosen", computed.token_id))
                     if one == token_id]
            table.add_row(f"{token_id}", repr(engine.token_text(token_id).text), f"{logprob:.6f}", ", ".join(marks))
        common.console().print(table)
        if force is not None:
            token_ids, text = points.continue_point(engine, point, force, num_continue)
            common.console().print(f"with token {force}: {token_ids}\n{text}", markup=False)
