"""A run can be killed, stopped, laid over devices, and goes wrong loudly."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from tests import tiny
from tests.train import tiny_run
from train import loop
from train.loop import Stopped, train
from train.metrics import METRICS_FILE, read_lines
from train.optimizer import OptimizerConfig, learning_rate
from train.recipes import recipe_of


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    output = tmp_path_factory.mktemp("unbroken")
    tiny_run.run(str(output), 6)
    return tiny_run.losses(str(output)), output


def program(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.train.tiny_run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_same_losses(output: Path, unbroken) -> None:
    """Equal but for the order in which a CPU's threads happen to sum: a last bit of float32."""
    found = tiny_run.losses(str(output))
    assert list(found) == list(unbroken[0])
    np.testing.assert_allclose(list(found.values()), list(unbroken[0].values()), rtol=1e-6)


def wait_for_checkpoint(output: Path, process: subprocess.Popen) -> None:
    """Until a checkpoint is whole: Orbax gives it its plain name at the end."""
    for _ in range(1200):
        found = [p.name for p in (output / "checkpoints").glob("*")] if output.exists() else []
        if any(name.isdecimal() for name in found):
            return
        if process.poll() is not None:
            raise AssertionError(process.communicate()[1][-2000:])
        time.sleep(0.1)
    raise AssertionError("no checkpoint came")


def test_steps_beside_a_loaded_model_are_compiled_once(tmp_path):
    settings = tiny_run.config(str(tmp_path))
    recipe, transform = recipe_of(settings), loop.optimizer(settings.optimizer, 6, 1)
    model = jax.device_put(tiny.model(num_layers=2), jax.devices()[0])  # as `load` leaves it
    state = loop._initial(settings, recipe, model, transform, None)
    step = loop.step_function(settings, recipe, transform, state, None)
    batch = next(tiny_run.Batches())
    for _ in range(2):
        state, _ = step(state, model, batch, None)
    assert step._cache_size() == 1


def test_the_capacity_is_reached_and_every_step_is_written(unbroken):
    _, output = unbroken
    lines = read_lines(output / METRICS_FILE)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["capacity"] < 0.5 * lines[0]["capacity"]
    assert all(line["loss"] > 0 and line["gradient_norm"] > 0 for line in lines)


def test_a_killed_run_resumes_with_the_losses_of_an_unbroken_one(tmp_path, unbroken):
    output = tmp_path / "killed"
    process = program("run", str(output), "6")
    wait_for_checkpoint(output, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    tiny_run.run(str(output), 6)
    assert_same_losses(output, unbroken)


def test_sigterm_saves_before_leaving(tmp_path, unbroken):
    output = tmp_path / "stopped"
    process = program("run", str(output), "6")
    wait_for_checkpoint(output, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    if process.returncode != 0:  # it may have been at its last step
        assert "asked to stop: saved at step" in errors
    tiny_run.run(str(output), 6)
    assert_same_losses(output, unbroken)


def test_every_mesh_gives_the_same_losses():
    process = program("meshes")
    shown, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-2000:]
    one, *others = json.loads(shown)
    for mesh, found in zip(tiny_run.MESHES[1:], others, strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-5, err_msg=str(mesh))


def settings_with(tmp_path, **changes):
    settings = tiny_run.config(str(tmp_path / "run"), **changes)
    return settings, recipe_of(settings)


class Broken(tiny_run.Batches):
    """Tokens outside the vocabulary embed as NaN."""

    def __next__(self):
        batch = super().__next__()
        if self.made == 3:
            batch["tokens"][:] = 10**6
        return batch


def test_a_loss_that_is_not_finite_stops_with_its_batch(tmp_path):
    from tests import tiny

    settings, recipe = settings_with(tmp_path)
    with pytest.raises(Stopped, match=r"step 3: the loss is nan; its batch is in .*step-3\.npz"):
        train(settings, recipe, tiny.model(num_layers=2), Broken(), lambda line: None)
    saved = np.load(tmp_path / "run" / "batch-of-step-3.npz")
    assert (saved["tokens"] == 10**6).all() and set(saved) == set(next(tiny_run.Batches()))


def test_another_config_does_not_continue_a_run(tmp_path):
    from tests import tiny

    settings, recipe = settings_with(tmp_path, steps=1)
    train(settings, recipe, tiny.model(num_layers=2), tiny_run.Batches(), lambda line: None)
    other, recipe = settings_with(tmp_path, steps=1, seed=3)
    with pytest.raises(ValueError, match="holds a run of another config"):
        train(other, recipe, tiny.model(num_layers=2), tiny_run.Batches(), lambda line: None)


def test_a_finished_run_does_nothing_more(tmp_path):
    from tests import tiny

    settings, recipe = settings_with(tmp_path, steps=2)
    model = tiny.model(num_layers=2)
    first = train(settings, recipe, model, tiny_run.Batches(), lambda line: None)
    shown = []
    again = train(settings, recipe, model, tiny_run.Batches(), shown.append)
    assert shown == ["resumed at step 2 of 2"]
    for name, value in first.params.items():
        np.testing.assert_array_equal(again.params[name], value)


def test_accumulated_gradients_are_those_of_one_larger_batch(tmp_path):
    """Two steps of the same batch make the update of one step of it."""
    from tests import tiny

    class Same(tiny_run.Batches):
        def __next__(self):
            self.made = 0
            return super().__next__()

    model = tiny.model(num_layers=2)
    ends = []
    module = {"kind": "retention", "width": 16, "memory": 4, "bias": 3.0, "positions": 0}
    for steps, accumulation in ((1, 1), (2, 2)):
        settings = tiny_run.config(
            str(tmp_path / str(steps)), steps=steps, accumulation=accumulation, module=module
        )
        state = train(settings, recipe_of(settings), model, Same(), lambda line: None)
        ends.append(state.params)
    for name in ends[0]:
        np.testing.assert_allclose(ends[1][name], ends[0][name], rtol=1e-5, atol=1e-7)


def test_metrics_behind_a_resumed_step_are_dropped(tmp_path):
    from train.metrics import Metrics

    metrics = Metrics(tmp_path, 0, tensorboard=False)
    for step in range(1, 6):
        metrics.write(step, {"loss": float(step)})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 6, "lo')
    Metrics(tmp_path, 3, tensorboard=False).write(4, {"loss": 40.0})
    assert [line["loss"] for line in read_lines(tmp_path / METRICS_FILE)] == [1, 2, 3, 40]


def test_tensorboard_gets_every_value(tmp_path):
    from train.metrics import Metrics

    pytest.importorskip("tensorboardX")
    metrics = Metrics(tmp_path, 0)
    metrics.write(1, {"loss": 2.5, "kl": 0.5})
    metrics.close()
    (events,) = (tmp_path / "tensorboard").glob("events*")
    assert b"loss" in events.read_bytes() and b"kl" in events.read_bytes()


def test_a_report_draws_the_run(unbroken, capsys):
    from kvjax.cli.main import main

    _, output = unbroken
    assert main(["report", str(output)]) == 0
    page = (output / "report.html").read_text()
    assert capsys.readouterr().out.strip() == str(output / "report.html")
    assert "6 of 6 steps" in page and "capacity" in page and "<svg" in page
    assert "<script" not in page and "http" not in page


def test_a_loss_explodes_where_it_is_far_above_all_recent_ones():
    guard = loop._Guard(20.0)
    mixture = [0.05, 0.1, 0.05, 0.1, 2.5] * 10  # needles, and now and then a row of text
    assert [guard.check(loss, 1.0) for loss in mixture] == [None] * 50
    assert guard.check(3.0, 1.0) is None
    assert guard.check(100.0, 1.0) == "the loss is 100, 33 times its recent largest"
    assert guard.check(float("inf"), 1.0) == "the loss is inf"
    nothing = loop._Guard(20.0)
    assert [nothing.check(0.0, 0.0) for _ in range(50)] == [None] * 50
    assert nothing.check(0.04, 0.0) == "the loss is 0.04, 40 times its recent largest"


def test_a_gradient_that_is_not_finite_stops_its_own_step(tmp_path):
    """Else the next loss would tell, behind a checkpoint of parameters that are lost."""
    settings = tiny_run.config(str(tmp_path))
    recipe = recipe_of(settings)

    class Broken:
        def __getattr__(self, name):
            return getattr(recipe, name)

        def loss(self, params, *rest):
            total, parts = recipe.loss(params, *rest)
            poison = jax.tree.leaves(params)[0].ravel()[0] * 0  # 0, of infinite slope
            return total + jax.numpy.sqrt(poison), parts

    with pytest.raises(Stopped, match=r"step 1: the gradient's norm is (nan|inf)"):
        train(settings, Broken(), tiny.model(num_layers=2), tiny_run.Batches(), lambda line: None)
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


def test_a_start_of_another_backbone_is_refused(tmp_path):
    model = tiny.model(num_layers=2)
    module = {"kind": "retention", "width": 16, "memory": 4}
    first = recipe_of(tiny_run.config(str(tmp_path), module=module))
    first.export(first.init(model, jax.random.key(0)), model, tmp_path / "export", {"model": "one"})
    module["start"] = str(tmp_path / "export")
    settings = tiny_run.config(str(tmp_path / "run"), module=module)
    other = kvjax.Decoder.random(model.config, jax.random.key(99))
    with pytest.raises(ValueError, match="was trained for one"):
        train(settings, recipe_of(settings), other, tiny_run.Batches(), lambda line: None)


def test_steps_whose_gradients_would_be_lost_are_refused(tmp_path):
    with pytest.raises(ValueError, match="steps=6: allowed are multiples of accumulation=4"):
        tiny_run.config(str(tmp_path), accumulation=4)


@pytest.mark.parametrize(
    ("steps", "decay", "warmup"), [(150, 0.5, 100), (100, 0.2, 100), (60, 0.2, 0)]
)
def test_what_the_warmup_leaves_of_the_steps_holds_the_decay(steps, decay, warmup):
    settings = OptimizerConfig(learning_rate=1.0, schedule="wsd", decay=decay, warmup=warmup)
    rates = np.asarray(learning_rate(settings, steps)(np.arange(steps + 1)))
    assert rates.max() == 1.0 and rates[-1] == pytest.approx(1e-6)
    falling = min(round(decay * steps), steps - warmup) or 1
    assert (np.diff(rates[-falling - 1 :]) < 0).all()
