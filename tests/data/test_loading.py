# SPDX-License-Identifier: Apache-2.0
import contextlib
import math
import os
import random
import signal
from itertools import islice

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_models.data import RowLoader, classification_dataset, eval_dataloader
from nystrom_models.data.loading import _end_workers, without_signals
from nystrom_models.training.loop import num_training_steps
from nystrom_models.training.optimization import OptimizationArguments

LENGTHS = random.Random(0).choices(range(1, 200), k=1003)


def collate(rows):
    """A batch that contains the numbers of its rows."""
    return {name: torch.tensor([row[name] for row in rows]) for name in ("id", "epoch", "length")}


def dataset(lengths=LENGTHS):
    return Dataset.from_dict({"id": range(len(lengths)), "length": lengths})


def steps(loader, number, num_processes=1, process_index=0, position=None):
    return list(islice(loader.steps(num_processes, process_index, position), number))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_workers_go_on_after_signals_and_end_with_the_process():
    workers = torch.utils.data.DataLoader(range(8), num_workers=1, worker_init_fn=without_signals)
    numbers = iter(workers)
    assert next(numbers) == 0
    [worker] = numbers._workers
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(worker.pid, number)
    assert [int(number) for number in islice(numbers, 6)] == [1, 2, 3, 4, 5, 6]
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        _end_workers()
        worker.join(5)
        assert not worker.is_alive()
        with contextlib.suppress(RuntimeError):  # it was killed
            numbers._shutdown_workers()
    finally:
        signal.signal(signal.SIGCHLD, handler)


def rows_of(step):
    """(epoch, row) of a step of one process, in the order of its micro-batches."""
    return [
        pair
        for batch, count in zip(step.batches, step.num_rows, strict=True)
        for pair in zip(batch["epoch"].tolist()[:count], batch["id"].tolist()[:count], strict=True)
    ]


def test_every_row_once_an_epoch_without_a_gap():
    loader = RowLoader(dataset(), collate, 16)
    seen = [pair for step in steps(loader, 126) for pair in rows_of(step)]  # 2,016 rows: more than two epochs
    by_epoch = [sorted(row for epoch, row in seen if epoch == number) for number in (0, 1)]
    assert by_epoch == [list(range(1003))] * 2
    assert all(len(rows_of(step)) == 16 for step in steps(loader, 126))


def test_a_step_is_a_fair_mixture_of_lengths():
    """Grouping rows by length within a step of them all had a coefficient of variation of about 0.5 here."""
    tokens = [
        sum(map(int, np.concatenate([b["length"] for b in step.batches])))
        for step in steps(RowLoader(dataset(), collate, 8, 4), 31)
    ]
    assert np.std(tokens) / np.mean(tokens) < 0.2


def test_rows_of_a_micro_batch_have_about_the_same_length():
    spreads, all_rows = [], []
    for step in steps(RowLoader(dataset(), collate, 8, 4), 31):
        spreads += [int(batch["length"].max() - batch["length"].min()) for batch in step.batches]
        together = torch.cat([batch["length"] for batch in step.batches])
        all_rows.append(int(together.max() - together.min()))
    assert np.mean(spreads) < 0.4 * np.mean(all_rows)


@pytest.mark.parametrize("tokens_per_step", [None, 2000])
def test_the_rows_of_a_step_do_not_depend_on_its_division(tokens_per_step):
    def taken(micro_batch, accumulation, processes):
        options = {"tokens_per_step": tokens_per_step} if tokens_per_step else {}
        loader = RowLoader(dataset(), collate, micro_batch, 1 if tokens_per_step else accumulation, **options)
        by_process = [steps(loader, 70, processes, rank) for rank in range(processes)]
        for together in zip(*by_process, strict=True):
            assert len({len(step.batches) for step in together}) == 1, "micro-batches of unequal number"
            assert len({step.position["rows"] for step in together}) == 1
        return [
            sorted(pair for step in together for pair in rows_of(step)) for together in zip(*by_process, strict=True)
        ]

    whole = taken(16, 1, 1)
    for division in ((4, 4, 1), (8, 1, 2), (2, 2, 4)):
        assert taken(*division) == whole


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=3, max_size=40),
    tokens=st.integers(30, 200),
    first=st.integers(0, 20),
    processes=st.integers(1, 3),
    grouped=st.booleans(),
)
def test_steps_of_tokens(lengths, tokens, first, processes, grouped):
    """Every row once per epoch, in steps with about the same number of tokens; resuming gives the same steps."""
    loader = RowLoader(dataset(lengths), collate, 4, tokens_per_step=tokens, group_by_length=grouped)
    plans = [list(islice(loader._plans(processes, rank, 0), 30)) for rank in range(processes)]
    seen, total = [], sum(lengths)
    for number, together in enumerate(zip(*plans, strict=True)):
        groups = [group for plan in together for group in plan.groups]
        assert all(len(group) <= 4 for group in groups)
        rows = [pair for group in groups for pair in group]
        assert rows, "an empty step"
        size = sum(lengths[row] for _, row in rows)
        seen += rows
        assert together[0].rows == len(seen)
        if not grouped:
            assert tokens - 30 < size < tokens + 30
            assert abs(sum(lengths[row] for _, row in seen) - (number + 1) * tokens) < 30
    assert len(seen) == len(set(seen))
    for epoch in range(seen[-1][0]):
        assert sorted(row for e, row in seen if e == epoch) == list(range(len(lengths)))
    again = list(islice(loader._plans(processes, 0, plans[0][first].rows), 29 - first))
    assert again == plans[0][first + 1 :]
    assert loader.steps_per_epoch() == (math.ceil(total / tokens) if grouped else total / tokens)
    if grouped and processes == 1:
        ends = [plan.rows for plan in plans[0]]
        steps = ends.index(len(lengths)) + 1 if len(lengths) in ends else None
        assert steps is None or steps <= -(-total // tokens)


@pytest.mark.parametrize(
    ("lengths", "tokens", "steps"),
    [([7] * 70 + [57], 512, 2), ([64] * 14, 256, 4), ([100] * 3, 100, 3), (LENGTHS, 256, None)],
)
def test_an_epoch_of_grouped_steps_has_as_many_as_the_run_takes(lengths, tokens, steps):
    loader = RowLoader(dataset(lengths), collate, 4, tokens_per_step=tokens, group_by_length=True)
    plans = list(islice(loader._plans(1, 0, 0), 8 * math.ceil(sum(lengths) / tokens)))
    for epochs in (1, 3, 7):
        number = num_training_steps(loader, OptimizationArguments(num_train_epochs=epochs))
        assert plans[number - 1].rows == epochs * len(lengths)
        assert number == (epochs * steps if steps else number)
    # In floating-point numbers, 1.1 · 50 is more than 55.
    rows = RowLoader(dataset([8] * 400), collate, 8)
    assert num_training_steps(rows, OptimizationArguments(num_train_epochs=1.1)) == 55


def test_grouped_steps_of_rows_of_the_same_length_are_full():
    loader = RowLoader(dataset([128] * 24), collate, 8, tokens_per_step=1024, group_by_length=True)
    assert [len(rows_of(step)) for step in steps(loader, 6)] == [8] * 6


def test_steps_of_rows_of_one_length_have_as_many_tokens():
    loader = RowLoader(dataset(), collate, 64, tokens_per_step=2000, group_by_length=True)
    # Two epochs without their last steps, which are smaller or larger.
    lengths = [np.concatenate([batch["length"] for batch in step.batches]) for step in steps(loader, 96)]
    tokens = np.array([step.sum() for step in lengths])
    assert np.std(tokens) / np.mean(tokens) < 0.05 and abs(np.mean(tokens) - 2000) < 50
    assert np.mean([step.max() - step.min() for step in lengths]) < 15  # of 199
    # Their order is random.
    assert abs(np.corrcoef([step.mean() for step in lengths[:-1]], [step.mean() for step in lengths[1:]])[0, 1]) < 0.4
    with pytest.raises(ValueError, match="tokens_per_step"):
        RowLoader(dataset(), collate, 4, group_by_length=True)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_goes_on_from_any_position(num_workers):
    loader = RowLoader(dataset(), collate, 4, 2, num_workers=num_workers)
    whole = [rows_of(step) for step in steps(loader, 260, 2, 1)]
    position = steps(loader, 131, 2, 1)[-1].position
    assert position == {"rows": 131 * 16}
    assert [rows_of(step) for step in steps(loader, 129, 2, 1, position)] == whole[131:]
    # With another number of processes or another micro-batch size, a step has the same rows.
    elsewhere = RowLoader(dataset(), collate, 16)
    others = [rows_of(step) for step in steps(loader, 129, 2, 0, position)]
    for one, first, second in zip(steps(elsewhere, 129, position=position), others, whole[131:], strict=True):
        assert sorted(rows_of(one)) == sorted(first + second)


def test_the_order_is_a_function_of_the_seed_and_draws_nothing_elsewhere():
    state = torch.get_rng_state()
    first = [rows_of(step) for step in steps(RowLoader(dataset(), collate, 16, seed=0), 9)]
    assert [rows_of(step) for step in steps(RowLoader(dataset(), collate, 16, seed=0), 9)] == first
    assert [rows_of(step) for step in steps(RowLoader(dataset(), collate, 16, seed=1), 9)] != first
    list(eval_dataloader(dataset(), collate_ids, 64))
    assert torch.equal(torch.get_rng_state(), state)


def test_each_epoch_has_an_order_of_its_own():
    taken = [{row for _, row in rows_of(step)} for step in steps(RowLoader(dataset(), collate, 17), 118)]
    assert set().union(*taken[:59]) == set().union(*taken[59:]) == set(range(1003))
    assert not any(one == other for one, other in zip(taken[:59], taken[59:], strict=True))


def test_a_process_without_rows_computes_what_does_not_count():
    loader = RowLoader(dataset([50, 60, 70]), collate, 4, tokens_per_step=70)
    by_process = [steps(loader, 6, 4, rank) for rank in range(4)]
    for together in zip(*by_process, strict=True):
        assert sum(sum(step.num_rows) for step in together) in (1, 2)
        assert all(len(batch["id"]) > 0 for step in together for batch in step.batches)


def collate_ids(rows):
    return [row["id"] for row in rows]


def test_evaluation_sees_every_row_once():
    loader = eval_dataloader(dataset(), collate_ids, 64)
    assert sorted(row for batch in loader for row in batch) == list(range(len(LENGTHS)))


def test_evaluation_goes_from_short_rows_to_long_ones():
    rows = [row for batch in eval_dataloader(dataset(), collate_ids, 64) for row in batch]
    assert [LENGTHS[row] for row in rows] == sorted(LENGTHS)


def test_what_cannot_be_divided_into_steps():
    with pytest.raises(
        ValueError, match=r"2 rows, .* 4 × .* 1 × 1 process\): --per_device_train_batch_size 2 works\."
    ):
        RowLoader(dataset([1, 2]), collate, 4).steps_per_epoch()
    loader = RowLoader(dataset([1] * 30), collate, 4, gradient_accumulation_steps=5)
    with pytest.raises(ValueError, match=r"the 40 of .* 5 × 2 processes\): --per_device_train_batch_size 3 works\."):
        loader.step_size(2)
    with pytest.raises(ValueError, match=r"lower --gradient_accumulation_steps\.$"):
        RowLoader(dataset([1]), collate, 4, gradient_accumulation_steps=2).steps_per_epoch()
    with pytest.raises(ValueError, match=r"--tokens_per_step 50 is less than the 199 tokens"):
        RowLoader(dataset(), collate, 4, tokens_per_step=50)
    with pytest.raises(ValueError, match="is empty"):
        RowLoader(dataset([]), collate, 4)


def test_classification_rows(tokenizer):
    rows = Dataset.from_dict({"text": ["the mean", "value " * 50], "label": ["b", "a"]})
    encoded = classification_dataset(rows, tokenizer, 16, label_names=["a", "b"])
    assert encoded["labels"] == [1, 0] and encoded["length"][1] == 16 and encoded["index"] == [0, 1]
    with pytest.raises(ValueError, match=r"contains \['b'\]"):
        classification_dataset(rows, tokenizer, 16, label_names=["a"])
    with pytest.raises(ValueError, match="has no column 'category'"):
        classification_dataset(rows, tokenizer, 16, label_column="category")
