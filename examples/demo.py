"""Train a mixture of experts whose experts live in another process: `make demo`.

Starts two real `experts-server` processes on loopback, each with eight feed-forward experts. With the first one it
trains a digit classifier: every forward and backward of the experts, and their optimizer, runs there. The second
one answers 20 ms late, as if it were far away, to show what it is worth to call all experts at once.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from digits import D_MODEL, Trainer, split_digits
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from server_process import ServerProcess
from timeline_picture import draw
from torch import Tensor

from moe_autograd.remote import connect
from moe_autograd.timeline import Timeline, record_timeline

NUM_EXPERTS, LATENCY_MS = 8, 20
BATCH, NUM_EPOCHS, ACCURACY_WANTED = 128, 30, 0.97
SERVE = f"--expert ffn --num-experts {NUM_EXPERTS} --d-model {D_MODEL} --optimizer adam --lr 2e-3".split()


def train(address: str, seed: int, report: Table) -> tuple[dict[str, Tensor], float]:
    """Train for all epochs and report; return all weights, and the accuracy on held-out images."""
    train_x, test_x, train_y, test_y = split_digits(seed)
    batches_per_epoch = len(train_x) // BATCH
    columns = (TextColumn("training"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn())
    values = TextColumn("loss {task.fields[loss]:.3f}  accuracy {task.fields[accuracy]:.3f}")
    with connect(address) as experts, Progress(*columns, values) as progress:
        trainer = Trainer(experts, num_steps=NUM_EPOCHS * batches_per_epoch)
        task = progress.add_task("", total=NUM_EPOCHS * batches_per_epoch, loss=float("nan"), accuracy=0.0)
        training_s = accuracy = 0.0
        for _ in range(NUM_EPOCHS):
            started_s = time.perf_counter()
            for batch in torch.randperm(len(train_x)).split(BATCH)[:batches_per_epoch]:
                loss = trainer.step(train_x[batch], train_y[batch])
                progress.update(task, advance=1, loss=loss)
            training_s += time.perf_counter() - started_s
            accuracy = trainer.accuracy(test_x, test_y)
            progress.update(task, accuracy=accuracy)
        weights = trainer.model.state_dict()  # the experts' too: they come from the server
        num_applied = sum(expert.num_updates for expert in experts.info().values())

    steps_per_s = trainer.num_steps / training_s
    report.add_row("test accuracy", f"{accuracy:.4f} of {len(test_x)} images held out")
    report.add_row("speed", f"{steps_per_s:.0f} steps, {steps_per_s * BATCH:,.0f} samples a second")
    report.add_row(
        "steps here",
        f"{trainer.num_steps}, which gave {trainer.num_updates:,} updates to {NUM_EXPERTS} experts",
    )
    report.add_row("applied there", f"{num_applied:,} updates, by the server's own count")
    if num_applied != trainer.num_updates:
        raise SystemExit(f"demo: expected {trainer.num_updates} updates on the server, got {num_applied}.")
    return weights, accuracy


def compare_far_away(address: str, weights: dict[str, Tensor], seed: int, report: Table, out: Path) -> None:
    """Time steps with experts far away, all at once and one by one; write the picture and the trace."""
    train_x, _, train_y, _ = split_digits(seed)
    with connect(address) as experts, record_timeline() as trace:
        trainer = Trainer(experts, num_steps=100)
        trainer.model.load_state_dict(weights)  # a trained router keeps all experts busy
        trainer.step(train_x[:BATCH], train_y[:BATCH])  # warm up
        trace.spans.clear()

        def timed(num_steps: int, **options: bool) -> tuple[float, Timeline]:
            steps = []
            for _ in range(num_steps):
                with record_timeline() as timeline:
                    started_s = time.perf_counter()
                    trainer.step(train_x[:BATCH], train_y[:BATCH], **options)
                    steps.append((time.perf_counter() - started_s, timeline))
            return sorted(steps, key=lambda step: step[0])[num_steps // 2]  # the median one

        together_s, together = timed(15)
        in_turn_s, in_turn = timed(5, one_after_the_other=True)

    report.add_row(f"a step, {LATENCY_MS} ms away", f"{together_s * 1e3:.0f} ms with the parallel map")
    report.add_row(
        "", f"{in_turn_s * 1e3:.0f} ms one call after the other: {in_turn_s / together_s:.1f} times as long"
    )
    trace.save_chrome_trace(out / "trace.json")
    title = f"One training step, {NUM_EXPERTS} experts {LATENCY_MS} ms away"
    panels = [
        ("All experts at once: MixtureOfExperts", together),
        ("One call after the other: a plain loop", in_turn),
    ]
    draw(panels, title, out / "timeline.png")
    report.add_row("written", f"{out / 'timeline.png'} and {out / 'trace.json'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for the picture and the trace"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if not 0 <= options.seed < 1 << 62:  # as of a server
        parser.error(f"argument --seed: expected 0 to {(1 << 62) - 1}, got {options.seed}")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # what is computed here is small: leave the cores to the servers

    console = Console()
    report = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    with (
        ServerProcess(*SERVE, "--seed", str(options.seed)) as near,
        ServerProcess(*SERVE, "--latency-ms", str(LATENCY_MS)) as far,
    ):
        console.print("two servers start, of eight experts each")
        weights, accuracy = train(near.wait_until_it_serves(), options.seed, report)
        compare_far_away(far.wait_until_it_serves(), weights, options.seed, report, options.out)
    console.print("", report, "\nBoth servers have drained and stopped.", sep="\n")
    if accuracy < ACCURACY_WANTED:
        raise SystemExit(f"demo: expected an accuracy of at least {ACCURACY_WANTED}, got {accuracy:.4f}.")


if __name__ == "__main__":
    main()
