"""``pagedcore serve`` beside ``vllm serve``: one model, one client, one run, in bfloat16 on the CPU.

    make bench-vllm                                      # both shapes, in an environment of vLLM's own
    python benchmarks/vllm_serve.py --vllm build/vllm [--shape qwen05b | 80m] [--rounds 3] [--markdown FILE]

Both servers are loaded all the time and take turns, in an order that is reversed every round. The server that waits
has no request, and the caption says how much processor time it used. A round is one burst of streams, all at once,
and then one stream alone, three times. Every round has prompts of its own, the same for both servers, so that no cache
has seen them. Greedy, end-of-text ignored, prompts as token ids: both generate the same number of tokens, though not
the same tokens.

The client is this process: it sends what it wrote before the clock started, notes when each piece of a response came,
and reads the pieces after the last one. A first token is there when the event with its id is complete.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

HERE: Final = Path(__file__).resolve().parent
LAST_CHUNK: Final = b"0\r\n\r\n"
"""How a chunked response ends (RFC 9112, section 7.1)."""
MAX_MODEL_LEN: Final = 1024
KV_GIB: Final = 2
START_LIMIT_S: Final = 300.0
PROMPT_LENGTHS: Final = (16, 256)
NUM_ALONE, ALONE = 3, (128, 64)
"""Streams alone in a round; prompt and output tokens of each."""


@dataclass(frozen=True)
class Shape:
    """A model with random weights, and the burst that it is measured with."""

    title: str
    tokens: tuple[int, int]
    """Prompts have tokens of this range."""
    num_streams: int
    num_tokens: int


SHAPES: Final = {
    "qwen05b": Shape("the shape of Qwen2.5-0.5B", (300, 4000), 32, 64),
    "80m": Shape("Llama, 80 M parameters", (300, 2000), 64, 136),
}


@dataclass(frozen=True)
class Exchange:
    """One response: when its bytes came, in seconds since the burst began."""

    pieces: list[tuple[float, bytes]]

    def token_times(self) -> list[tuple[float, int]]:
        """Return when each event with tokens was complete, and how many it has. Exits if the response is no stream."""
        stamps, whole = [], b""
        for at_s, piece in self.pieces:
            whole += piece
            stamps.append((len(whole), at_s))
        head, _, body = whole.partition(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0] or b"data: [DONE]" not in body:
            raise SystemExit(f"not a whole stream: {whole[:500]!r}")
        found, places = [], iter(stamps)
        end, at_s = next(places)
        for place, text in _chunks(body, len(head) + 4):
            while place > end:
                end, at_s = next(places)
            found += [(at_s, count) for count in map(_num_tokens, text.split(b"\n\n")) if count]
        return found


def _chunks(body: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield whole events of a chunked body with the place in the response where their last byte is."""
    place, text = 0, b""
    while place < len(body):
        size, _, _ = body[place : place + 20].partition(b"\r\n")
        start = place + len(size) + 2
        place = start + int(size, 16) + 2
        text += body[start : place - 2]
        whole, mark, text = text.rpartition(b"\n\n")
        if mark:
            yield offset + place - 2, whole


def _num_tokens(event: bytes) -> int:
    if not event.startswith(b"data: {"):
        return 0
    data = json.loads(event.removeprefix(b"data: "))
    if "choices" not in data:
        raise SystemExit(f"not an event of a completion: {event[:500]!r}")
    return sum(len(choice.get("token_ids") or ()) for choice in data["choices"])


@dataclass(frozen=True)
class Burst:
    """What came of requests that were sent together. Times in milliseconds."""

    tokens_per_s: float
    first_tokens: list[float]
    gaps: list[float]
    """Between the events of a stream."""
    per_token: list[float]
    """Of each stream after its first token."""
    num_events: int
    num_bytes: int


def burst(port: int, prompts: Sequence[Sequence[int]], num_tokens: int) -> Burst:
    """Send all prompts at once, each over a connection of its own, and read all streams to their ends."""
    requests = [_request(prompt, num_tokens) for prompt in prompts]
    connections = [_connected(port) for _ in requests]
    exchanges = {connection: Exchange([]) for connection in connections}
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, exchanges[connection].pieces)
        begin_s = time.perf_counter()
        for connection, request in zip(connections, requests, strict=True):
            connection.sendall(request)
        while selector.get_map():
            for key, _ in selector.select():
                data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                key.data.append((time.perf_counter() - begin_s, data))
                # Why two pieces: the end may come in a piece of its own.
                if not data or b"".join(piece for _, piece in key.data[-2:]).endswith(LAST_CHUNK):
                    selector.unregister(key.fileobj)
        wall_s = time.perf_counter() - begin_s
    for connection in connections:
        connection.close()
    return _read(list(exchanges.values()), num_tokens, wall_s)


def _read(exchanges: list[Exchange], num_tokens: int, wall_s: float) -> Burst:
    streams = [exchange.token_times() for exchange in exchanges]
    for stream in streams:
        if (got := sum(count for _, count in stream)) != num_tokens:
            raise SystemExit(f"a stream has {got} tokens, {num_tokens} were asked for")
    gaps = [later - sooner for stream in streams for (sooner, _), (later, _) in pairwise(stream)]
    per_token = [(stream[-1][0] - stream[0][0]) / (num_tokens - stream[0][1]) for stream in streams]
    return Burst(num_tokens * len(streams) / wall_s, [1e3 * stream[0][0] for stream in streams],
                 [1e3 * gap for gap in gaps], [1e3 * one for one in per_token], sum(map(len, streams)),
                 sum(len(piece) for exchange in exchanges for _, piece in exchange.pieces))


def _request(prompt: Sequence[int], num_tokens: int) -> bytes:
    body = json.dumps({"model": "model", "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0,
                       "ignore_eos": True, "stream": True, "return_token_ids": True}).encode()
    head = ("POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n")
    return head.encode() + body


def _connected(port: int) -> socket.socket:
    """Open a connection and use it once, as those of a client's pool have been."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/health")
    connection.getresponse().read()
    assert isinstance(connection.sock, socket.socket)
    return connection.sock


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    name: str
    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """Return the processor seconds of all its processes."""
        times = [process.cpu_times() for process in (self.process, *self.process.children(recursive=True))]
        return sum(one.user + one.system for one in times)


def commands(model: Path, vllm: Path, num_seqs: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return how to start the two, less host and port, and what each needs in its environment."""
    common = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(num_seqs), "--dtype", "bfloat16"]
    preloads = [*vllm.glob("tcmalloc/**/libtcmalloc_minimal.so.4"), vllm / "lib" / "libiomp5.so"]
    if len(preloads) != 2 or not preloads[1].exists():
        raise SystemExit(f"{vllm} lacks tcmalloc or libiomp5, without which vLLM is slower: make bench-vllm makes it")
    return {
        "pagedcore": ([sys.executable, "-m", "pagedcore", "serve", "--model", f"model={model}",
                       "--kv-memory", f"{KV_GIB}GiB", *common], {}),
        # Why not "vllm serve", which runs this module: the command of vLLM's CPU wheel looks for its version under
        # another distribution's name, and ends.
        "vLLM": ([str(vllm / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
                  "--served-model-name", "model",
                  "--max-num-batched-tokens", "2048", "--disable-log-stats", "--disable-uvicorn-access-log", *common],
                 {"LD_PRELOAD": ":".join(map(str, preloads)), "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
                  "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}", "VLLM_NO_USAGE_STATS": "1",
                  "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CACHE_ROOT": str(vllm / "cache"),
                  "TORCHINDUCTOR_CACHE_DIR": str(vllm / "cache" / "inductor")}),
    }


@contextmanager
def serving(name: str, command: list[str], environment: dict[str, str], log: Path) -> Iterator[Server]:
    """Start a server on a port of its own, and end it with the block. Yields at once; ``wait`` for it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    # Why in this order: what the operator sets counts.
    env = {"HF_HUB_OFFLINE": "1", **environment, **os.environ}
    if "LD_PRELOAD" in environment:
        env |= {"LD_PRELOAD": environment["LD_PRELOAD"], "PYTHONPATH": ""}
    with (log.open("w", encoding="utf-8") as output,
          subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], env=env, stdout=output,
                           stderr=output) as process):
        try:
            yield Server(name, port, psutil.Process(process.pid))
        finally:
            process.terminate()


def wait(server: Server, log: Path) -> None:
    """Wait until the server answers. Exits with the end of its log if it does not."""
    deadline = time.monotonic() + START_LIMIT_S
    while server.process.is_running() and server.process.status() != "zombie" and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"{server.name} did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")


def model_of(name: str, folder: Path) -> Path:
    """Return the directory of a shape's model in a folder, made the first time."""
    made = folder / name
    if not (made / "tokenizer_config.json").exists():
        made.mkdir(parents=True, exist_ok=True)
        code = f"from door_measuring import write_model, SIZES; write_model({str(made)!r}, SIZES['80m'])"
        command = [str(HERE / "peers" / "make_model.py"), str(made)] if name == "qwen05b" else ["-c", code]
        # Why in a process of its own: this one is the client, and has no threads that compute.
        subprocess.run([sys.executable, *command], check=True, cwd=HERE)
    return made


@dataclass(frozen=True)
class Turn:
    """What one server did in one round."""

    together: Burst
    alone: list[Burst]


def take_turn(port: int, shape: Shape, number: int, num_streams: int) -> Turn:
    """Run a round's requests, which are the same for every server."""
    lengths, tokens = random.Random(0), random.Random(f"round {number}")

    def prompt(length: int) -> list[int]:
        return [tokens.randrange(*shape.tokens) for _ in range(length)]

    prompts = [prompt(lengths.randint(*PROMPT_LENGTHS)) for _ in range(num_streams)]
    singles = [prompt(ALONE[0]) for _ in range(NUM_ALONE)]
    together = burst(port, prompts, shape.num_tokens)
    return Turn(together, [burst(port, [one], ALONE[1]) for one in singles])


def measure(servers: list[Server], shape: Shape, rounds: int, num_streams: int) -> tuple[list[dict[str, Turn]], float]:
    """Take turns, after one round that does not count; return the turns and the idle servers' share of a core."""
    results, idle_s, wall_s = [], 0.0, 0.0
    for number in range(-1, rounds):
        turns = {}
        for server in servers if number % 2 == 0 else servers[::-1]:
            others = [other for other in servers if other is not server]
            gc.collect()
            begin_s, before_s = time.perf_counter(), sum(other.cpu_s() for other in others)
            turns[server.name] = take_turn(server.port, shape, number, num_streams)
            print(f"round {number}, {server.name}: {time.perf_counter() - begin_s:.1f} s", file=sys.stderr)
            if number >= 0:
                wall_s += time.perf_counter() - begin_s
                idle_s += sum(other.cpu_s() for other in others) - before_s
        results.append(turns)
    return results[1:], idle_s / wall_s


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so large a share of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


Figure = tuple[str, Callable[[Turn], float], bool]
"""What it is called, how it is read off, whether more is better."""


def figures(num_streams: int) -> list[Figure]:
    """Return the rows of the table."""
    median = statistics.median
    many, alone = f"{num_streams} streams", "1 stream"
    return [
        (f"{many}: tokens/s", lambda turn: turn.together.tokens_per_s, True),
        (f"{many}: ms to the first token, median", lambda turn: median(turn.together.first_tokens), False),
        (f"{many}: ms to the first token, p99", lambda turn: percentile(turn.together.first_tokens, 0.99), False),
        (f"{many}: ms per token after it, median", lambda turn: median(turn.together.per_token), False),
        (f"{many}: ms between events, median", lambda turn: median(turn.together.gaps), False),
        (f"{many}: ms between events, p99", lambda turn: percentile(turn.together.gaps, 0.99), False),
        (f"{alone}: tokens/s", lambda turn: median(one.tokens_per_s for one in turn.alone), True),
        (f"{alone}: ms to the first token", lambda turn: median(one.first_tokens[0] for one in turn.alone), False),
        (f"{alone}: ms per token after it", lambda turn: median(one.per_token[0] for one in turn.alone), False),
    ]


def rows_of(results: list[dict[str, Turn]], num_streams: int) -> list[list[str]]:
    """Return the table's cells: both medians, and the ratio of each round, over 1 where pagedcore is better."""
    rows = []
    for name, read, is_more_better in figures(num_streams):
        ours, theirs = ([read(turns[server]) for turns in results] for server in ("pagedcore", "vLLM"))
        ratios = [a / b if is_more_better else b / a for a, b in zip(ours, theirs, strict=True)]
        rows.append([name, f"{statistics.median(ours):.1f}", f"{statistics.median(theirs):.1f}",
                     f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"])
    return rows


def caption(given: argparse.Namespace, results: list[dict[str, Turn]], idle_share: float, load: float) -> str:
    """Return what has to be known of a run: the machine, what crossed the wire, whether anything else ran."""
    sent = []
    for name in ("pagedcore", "vLLM"):
        bursts = [turns[name].together for turns in results]
        num_tokens = given.streams * SHAPES[given.shape].num_tokens * len(bursts)
        sent.append(f"{name} {sum(one.num_events for one in bursts) / num_tokens:.2f} events and "
                    f"{sum(one.num_bytes for one in bursts) / num_tokens:.0f} bytes a token")
    return (f"{os.cpu_count()} cores, load average {load:.1f} before; the server that waits used {idle_share:.1%} of a "
            f"core; over the wire: {', '.join(sent)}")


def show(title: str, note: str, rows: list[list[str]], markdown: Path | None) -> None:
    """Print the table, and append it to a file if one is given."""
    heads = ["", "pagedcore", "vLLM", "better by", "lowest to highest"]
    table = Table(title=title, caption=note)
    for head in heads:
        table.add_column(head, justify="right" if head else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    if markdown is not None:
        lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
        with markdown.open("a", encoding="utf-8") as file:
            file.write(f"{title}. {note}.\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="the environment that make bench-vllm makes")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen05b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, help="in a burst; 32 with qwen05b and 64 with 80m if not given")
    parser.add_argument("--markdown", type=Path, help="a file that gets the table too")
    given = parser.parse_args()
    given.streams = given.streams or SHAPES[given.shape].num_streams
    return given


def main() -> None:
    """Measure and print."""
    given, load = parse(), os.getloadavg()[0]
    vllm, shape = given.vllm.resolve(), SHAPES[given.shape]
    model = model_of(given.shape, vllm / "models")
    with ExitStack() as stack:
        folder, servers = Path(stack.enter_context(tempfile.TemporaryDirectory())), list[Server]()
        for name, (command, environment) in commands(model, vllm, given.streams).items():
            servers.append(stack.enter_context(serving(name, command, environment, folder / name)))
        for server in servers:
            wait(server, folder / server.name)
        gc.freeze()
        results, idle_share = measure(servers, shape, given.rounds, given.streams)
    title = (f"{shape.title}: bursts of {given.streams} prompts of {PROMPT_LENGTHS[0]} to {PROMPT_LENGTHS[1]} tokens "
             f"with {shape.num_tokens} new ones each, {ALONE[0]} and {ALONE[1]} alone; median of {given.rounds} rounds")
    show(title, caption(given, results, idle_share, load), rows_of(results, given.streams), given.markdown)


if __name__ == "__main__":
    main()
