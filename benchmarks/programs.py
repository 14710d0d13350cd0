"""Random programs, folded and compared with themselves in float64, by NumPy: nothing is compiled.

    python -m benchmarks.programs [--count N] [--first SEED] [--tolerance T] [--kind dense|streams] [--thorough]
    python -m benchmarks.programs --generator second [--count N] [--first SEED] [--state FILE]

Two kinds: Dense layers and norms in any order, and residual streams. Prints every program whose folded outputs differ
and what it is made of, the largest difference, and what became of the norms. Thorough, also the derivatives through
contract_traced, and inputs of other shapes, for which the folded program must be right or raise ShapeError.

The difference is relative to the largest entry of an output and to how much rounding alone moves that output: a program
that ends in the difference of two nearly equal arrays has no better answer.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import jaxfold
from jaxfold._fold._program import Equation
from tests.fold.numpy_jaxpr import FELL_BACK, evaluate_equation, run, traced, wide
from tests.fold.programs import Drawn, draw, draw_stream
from tests.fold.written import write

TOLERANCE = 1e-9
# Below this share of what went into it an entry is rounding: 1 ulp of the inputs must not be taken for a result.
NOISE = 1e-13


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one program.

    Attributes:
        error: the larger of those of contract and contract_traced; inf if only one of original and folded is finite.
        rows: of the report.
        parameters, reductions: before and after.
        parts: what it is made of.
    """

    seed: int
    kind: str
    error: float
    rows: tuple[jaxfold.FoldRow, ...]
    parameters: tuple[int, int]
    reductions: tuple[int, int]
    parts: tuple[str, ...]

    @property
    def norms(self) -> int:
        return len(self.rows)

    def count(self, *decisions: str) -> int:
        """How many norms were contracted, centred, absorbed or skipped."""
        return sum(row.decision in decisions for row in self.rows)

    @property
    def weightless(self) -> int:
        return sum(row.weightless for row in self.rows)


def _dense(seed: int) -> Drawn:
    fn, params, x = draw(seed)
    return Drawn(fn, params, (x,), (), ((x[:1],), (x[:2],), (x[0],)))


KINDS: dict[str, Callable[[int], Drawn]] = {"dense": _dense, "streams": draw_stream}


def examine(seed: int, kind: str = "dense", *, spoil: float = 0.0) -> Outcome:
    """Draws a program, folds it and runs it both ways; one array of coefficients has ``1 + spoil`` times its values."""
    drawn = KINDS[kind](seed)
    folded = jaxfold.fold(drawn.fn, drawn.params, *drawn.inputs)
    spoilt = _spoilt(spoil, np.random.default_rng(seed)) if spoil else lambda contracted: contracted

    def both(contracted: Any, params: Any, *inputs: Any) -> list[Any]:
        return [folded.apply(each, *inputs) for each in (contracted, spoilt(folded.contract_traced(params)))]

    arguments = (drawn.params, *drawn.inputs)
    original = traced(drawn.fn, *arguments)
    truth, moved = original(*arguments), original(*_moved(arguments))
    ours = run(both, spoilt(contract(folded, drawn.params)), *arguments)
    error = max(_differences(ours, truth * 2, moved * 2))
    report = folded.report
    return Outcome(seed, kind, error, report.rows, report.parameters, report.reductions, drawn.parts)


def contract(folded: jaxfold.Folded, params: Any) -> dict[str, Any]:
    """As Folded.contract, but with what the program itself computes from parameters computed by NumPy as well."""
    evaluate = Equation.evaluate

    def in_numpy(equation: Equation, arguments: Sequence[Any]) -> list[Any]:
        if any(isinstance(argument, Tracer) for argument in arguments):
            return evaluate(equation, arguments)
        return evaluate_equation(equation.source, arguments)

    with mock.patch.object(Equation, "evaluate", in_numpy):
        return folded.contract(params)


def _spoilt(spoil: float, rng: np.random.Generator) -> Callable[[Any], Any]:
    chosen = rng.random()

    def change(contracted: Any) -> Any:
        leaves, structure = jax.tree.flatten(contracted["blocks"])
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(contracted["blocks"])]
        names = [name for name in paths if "rows" not in name]  # rows go with their kernel
        factors = dict.fromkeys(names[int(chosen * len(names)) :][:1], 1 + spoil)
        leaves = [leaf * factors.get(path, 1.0) for path, leaf in zip(paths, leaves, strict=True)]
        return {**contracted, "blocks": structure.unflatten(leaves)}

    return change


def derivatives(seed: int, kind: str = "dense") -> float:
    """The error of derivatives in all parameters and real inputs, through contract_traced."""
    drawn = KINDS[kind](seed)
    folded = jaxfold.fold(drawn.fn, drawn.params, *drawn.inputs)
    real = [index for index, array in enumerate(drawn.inputs, start=1) if np.issubdtype(array.dtype, np.floating)]

    def of(fn: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*arguments: Any) -> Any:
            return sum(jnp.sum(jnp.sin(leaf + 0.3 * index)) for index, leaf in enumerate(fn(*arguments)))

        return jax.grad(loss, (0, *real))

    arguments = (drawn.params, *drawn.inputs)
    original = traced(of(drawn.fn), *arguments)
    ours = run(of(lambda params, *inputs: folded.apply(folded.contract_traced(params), *inputs)), *arguments)
    return max(_differences(ours, original(*arguments), original(*_moved(arguments))))


def resized(seed: int, kind: str = "dense") -> list[float]:
    """The errors for inputs of other shapes; NaN where they are refused with ShapeError."""
    drawn = KINDS[kind](seed)
    folded = jaxfold.fold(drawn.fn, drawn.params, *drawn.inputs)
    contracted = contract(folded, drawn.params)
    errors = []
    for inputs in drawn.resized:
        arguments = (drawn.params, *inputs)
        try:
            original = traced(drawn.fn, *arguments)
        except (TypeError, ValueError):
            continue  # the program itself is made for one shape
        try:
            ours = run(folded.apply, contracted, *inputs)
        except jaxfold.ShapeError:
            errors.append(float("nan"))
            continue
        errors.append(max(_differences(ours, original(*arguments), original(*_moved(arguments)))))
    return errors


def _moved(arguments: tuple[Any, ...]) -> Any:
    """With parameters and inputs that differ by little more than rounding."""
    params, *inputs = arguments
    real = [np.issubdtype(array.dtype, np.floating) for array in inputs]
    moved = [array * (1 - NOISE) if own else array for array, own in zip(inputs, real, strict=True)]
    return jax.tree.map(lambda leaf: leaf * (1 + NOISE), params), *moved


def _differences(
    result: Sequence[Any], truth: Sequence[Any], moved: Sequence[Any], least: float = 1e-30
) -> list[float]:
    errors = []
    for ours, theirs, other in zip(
        map(np.asarray, result), map(np.asarray, truth), map(np.asarray, moved), strict=True
    ):
        if ours.shape != theirs.shape or (np.isfinite(ours) != np.isfinite(theirs)).any():
            errors.append(float("inf"))
            continue
        finite = np.isfinite(theirs) & np.isfinite(other)
        ours, theirs, other = (array[finite] for array in (ours, theirs, other))
        if theirs.size:
            amplified = float(np.abs(other - theirs).max()) / NOISE  # by so much are errors of the inputs
            size = max(float(np.abs(theirs).max()), amplified, least)
            errors.append(float(np.abs(ours - theirs).max()) / size)
    return errors or [0.0]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of one written program.

    Attributes:
        errors: by what was compared; at most 1 where the folded program is right, inf where it crashed.
        refused: the errors of jaxfold's own by what was refused.
    """

    seed: int
    errors: dict[str, float]
    refused: dict[str, str]
    decisions: dict[str, int]
    source: str

    @property
    def wrong(self) -> dict[str, float]:
        return {name: error for name, error in self.errors.items() if not error <= 1}


def judge(seed: int, *, spoil: float = 0.0) -> Verdict:
    """Compares one written program with itself folded: where it was traced, elsewhere, and in its derivatives.

    What went wrong stands in the errors by name: "contract" is float64's offline, "traced" that of contract_traced.
    """
    written = write(seed)
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    spoilt = _spoilt(spoil, np.random.default_rng(seed)) if spoil else lambda contracted: contracted

    def attempt(name: str, truth: Compared | None, ours: Callable[[], list[Any]]) -> None:
        if truth is None:
            return
        try:
            errors[name] = truth.error(ours())
        except jaxfold.JaxfoldError as error:
            refused[name] = f"{type(error).__name__}: {error}"
        except Exception as error:
            errors[f"{name}, {type(error).__name__}: {str(error)[:200]}"] = float("inf")

    def original(fn: Callable[..., Any], *arguments: Any) -> Compared | None:
        try:
            return Compared(fn, arguments, written.rounding)
        except (TypeError, ValueError, NotImplementedError):
            return None  # not a program for these inputs, or without derivatives

    def traced_apply(params: Any, *inputs: Any) -> Any:
        return folded.apply(spoilt(folded.contract_traced(params)), *inputs)

    fn, params, second = written.fn, written.params, written.second
    at = original(fn, params, *written.inputs)
    if at is None:
        return Verdict(seed, {}, {}, {}, written.source)
    try:
        folded = jaxfold.fold(fn, params, *written.inputs)
    except Exception as error:
        return Verdict(seed, {f"fold, {type(error).__name__}: {error}": float("inf")}, {}, {}, written.source)
    contracted: dict[int, Any] = {}

    def applied(values: Any, inputs: Any) -> list[Any]:
        if id(values) not in contracted:
            contracted[id(values)] = spoilt(contract(folded, values))
        return run(folded.apply, contracted[id(values)], *inputs)

    attempt("contract", at, lambda: applied(params, written.inputs))
    attempt("traced", at, lambda: run(traced_apply, params, *written.inputs))
    attempt("other parameters", at.elsewhere(second, *written.inputs), lambda: applied(second, written.inputs))
    for name, inputs in {"other batch": written.other_batch, "other rank": written.other_rank}.items():
        attempt(name, original(fn, params, *inputs), lambda inputs=inputs: applied(params, inputs))
    # What comes back through a cast to 8 bits is cast as well: two readers of it have their parts rounded, not the sum.
    loss = None if "float8" in written.source else original(_loss(fn), params, *written.inputs)
    attempt("derivatives", loss, lambda: run(_loss(traced_apply), params, *written.inputs))
    decisions = collections.Counter(row.decision for row in folded.report.rows)
    return Verdict(seed, errors, refused, dict(decisions), written.source)


def _loss(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The derivatives of a smooth function of all outputs without symmetries, in parameters and input."""

    def smooth(leaf: Any) -> Any:
        return jnp.sum(jnp.sin(leaf + 0.3) * np.cos(np.arange(leaf.size)).reshape(leaf.shape))

    def loss(params: Any, x: Any) -> Any:
        return sum(map(smooth, fn(params, x)))

    return jax.grad(loss, (0, 1))


class Compared:
    """The original at some arguments: what is right, and how far from it rounding leads.

    Where the program rounds to fewer digits, which is no part of what it means, what is right is computed without: then
    the folded program may err by some times as much as the original, or as those digits do in an output.
    """

    LEAST = 1e-4  # so that 1e-13 is nothing: what is exactly 0 is a sum of numbers about 1, or of none
    TIMES = 8.0  # the largest of few roundings, against the largest of as few others

    def __init__(self, fn: Callable[..., Any], arguments: tuple[Any, ...], rounding: float) -> None:
        self.evaluate, self.rounding = traced(fn, *arguments), rounding
        self._set(arguments)

    def _set(self, arguments: tuple[Any, ...]) -> None:
        self.truth, self.moved = self.evaluate(*arguments), self.evaluate(*_moved(arguments))
        if self.rounding:
            with wide():
                self.exact = self.evaluate(*arguments)
                self.shaken = self.evaluate(*_moved(arguments))

    def elsewhere(self, *arguments: Any) -> Compared:
        """For other values of arguments of the same shapes."""
        other = copy.copy(self)
        other._set(arguments)
        return other

    def error(self, ours: list[Any]) -> float:
        """At most 1 if it is right; inf if other entries are finite."""
        if not self.rounding:
            return max(_differences(ours, self.truth, self.moved, self.LEAST)) / TOLERANCE
        worst = 0.0
        for one, truth, exact, shaken in zip(ours, self.truth, self.exact, self.shaken, strict=True):
            if one.shape != truth.shape or (np.isfinite(one) != np.isfinite(truth)).any():
                return float("inf")
            finite = np.isfinite(truth) & np.isfinite(exact) & np.isfinite(shaken)
            if not finite.any():
                continue
            one, truth, exact, shaken = (array[finite] for array in (one, truth, exact, shaken))
            amplified = np.abs(shaken - exact).max() / NOISE
            allowed = np.abs(truth - exact).max() + self.rounding * max(np.abs(exact).max(), amplified)
            worst = max(worst, float(np.abs(one - exact).max() / (self.TIMES * allowed + 1e-30)))
        return worst


def _summary(outcomes: list[Outcome]) -> str:
    """What became of the norms, and of the numbers."""
    norms = max(sum(o.norms for o in outcomes), 1)
    counts = {name: sum(o.count(name) for o in outcomes) for name in ("contracted", "centred", "absorbed", "skipped")}
    shares = ", ".join(f"{count:,} {name} ({count / norms:.0%})" for name, count in counts.items())
    weightless = sum(o.weightless for o in outcomes)
    some = sum(o.count("skipped") < o.norms for o in outcomes)
    parameters = [sum(o.parameters[index] for o in outcomes) for index in (0, 1)]
    reductions = [sum(o.reductions[index] for o in outcomes) for index in (0, 1)]
    more = sum(o.parameters[1] > o.parameters[0] for o in outcomes)
    return (
        f"{norms:,} norms: {shares}; {weightless:,} of them weightless, in {some:,} programs\n"
        f"{parameters[0]:,} parameters before, {parameters[1]:,} after; more than before in {more:,} programs\n"
        f"{reductions[0]:,} sums over the features of norms before, {reductions[1]:,} after"
    )


def judged(first: int, count: int, state: pathlib.Path | None) -> list[dict[str, Any]]:
    """Return the verdicts on these seeds. A file keeps the finished ones, one a line. What is wrong is printed."""
    lines = state.read_text().splitlines() if state is not None and state.exists() else []
    done = {verdict["seed"]: verdict for verdict in map(json.loads, lines)}
    for seed in range(first, first + count):
        if seed in done:
            continue
        verdict = judge(seed)
        done[seed] = {
            "seed": seed,
            "wrong": {name: repr(error) for name, error in verdict.wrong.items()},
            "refused": verdict.refused,
            "compared": len(verdict.errors),
            "decisions": verdict.decisions,
        }
        if verdict.wrong:
            print(f"{seed}: {verdict.wrong}\n{verdict.source}", flush=True)
        if state is not None:
            with state.open("a") as file:
                file.write(json.dumps(done[seed]) + "\n")
        if seed % 500 == 499:
            jax.clear_caches()
    return [done[seed] for seed in range(first, first + count)]


def _told(verdicts: list[dict[str, Any]]) -> str:
    refused = [(name, reason) for verdict in verdicts for name, reason in verdict["refused"].items()]
    reasons = collections.Counter(f"{name}: {re.sub(r'[0-9]+', '#', reason)[:150]}" for name, reason in refused)
    decisions: collections.Counter[str] = collections.Counter()
    for verdict in verdicts:
        decisions.update(verdict["decisions"])
    return "\n".join(
        [
            f"{len(verdicts):,} programs, {sum(bool(v['wrong']) for v in verdicts)} wrong; "
            f"{sum(v['compared'] for v in verdicts):,} comparisons, {len(refused):,} refusals",
            "norms: " + ", ".join(f"{count:,} {name}" for name, count in decisions.items()),
            *(f"{count:6,} {reason}" for reason, count in reasons.most_common(20)),
            f"run in JAX: {dict(FELL_BACK)}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many programs of each kind (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="(default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, help="(default: both)")
    parser.add_argument("--thorough", action="store_true", help="derivatives and other shapes as well")
    parser.add_argument("--generator", choices=["first", "second"], default="first", help="(default: %(default)s)")
    parser.add_argument(
        "--state", type=pathlib.Path, metavar="FILE", help="keeps the second's verdicts, to go on later"
    )
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if options.generator == "second":
        print(_told(judged(options.first, options.count, options.state)))
        return
    for kind in [options.kind] if options.kind else KINDS:
        outcomes, wrong, refused, shapes = [], 0, 0, 0
        for seed in range(options.first, options.first + options.count):
            outcome = examine(seed, kind)
            outcomes.append(outcome)
            errors = {"outputs": outcome.error}
            if options.thorough:
                others = resized(seed, kind)
                refused, shapes = refused + int(np.isnan(others).sum()), shapes + len(others)
                errors |= {"derivatives": derivatives(seed, kind), "other shapes": float(np.nanmax([0.0, *others]))}
            large = {name: error for name, error in errors.items() if not error < options.tolerance}
            wrong += bool(large)
            for name, error in large.items():
                print(f"{kind} {seed}, {name}: {error:.1e}. {'; '.join(outcome.parts)}", flush=True)
            if seed % 500 == 499:
                jax.clear_caches()  # of traces, which programs do not share
        largest = max(outcome.error for outcome in outcomes)
        print(f"{len(outcomes):,} programs, {kind}: {wrong} wrong, largest error {largest:.1e}\n{_summary(outcomes)}")
        if options.thorough:
            print(f"{shapes:,} times inputs of other shapes, {refused:,} of them refused")


if __name__ == "__main__":
    main()
