"""Mutants of machine code: one instruction removed or changed. The tests have to see them.

A subject is a few launches with what they should compute. Only instructions that its runs execute
are changed; which, a seed decides.
"""

import dataclasses
import itertools
import random
import re

from mla_fusion.attention import triton as attention
from mla_fusion.attention.plan.buffers import PLANNED
from mla_fusion.attention.triton import epilogue as epilogues
from mla_fusion.cli.bench.kit import poisoned
from mla_fusion.kernels import triton
from tests.amd import assembly, decode, encode, epilogue, execute, region, test_planner
from tests.amd.provider import WRITABLE, machine
from tests.attention import epilogue_cases
from tests.kernels import cases

NOTHING = assembly.instruction(0, "s_nop", "0")
# What orders memory between workgroups.
REMOVED = {
    "global_atomic_add": "atomic removed",
    "buffer_wbl2": "write-back removed",
    "buffer_inv": "invalidation removed",
}
_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "lg": "eq",
             "neq": "eq", "o": "u", "u": "o"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
    """An instruction of launch number `launch`, and what stands in its place and in that of the
    `count` - 1 instructions behind it."""

    launch: int
    index: int
    kind: str
    before: assembly.Instruction
    after: assembly.Instruction
    count: int = 1

    def __str__(self):
        return f"{self.kind}, line {self.before.line}: {self.before.text} -> {self.after.text}"


class Run:
    """Launches that can be repeated.

    reset: makes their outputs as they were before the first; wrong: says what is wrong with them.
    """

    def __init__(self, launches, reset, wrong, settings):
        self.launches, self.reset, self.wrong, self.settings = launches, reset, wrong, settings
        self.reset()
        self.outcomes = [self._execute(each, settings) for each in launches]
        found = [each.first for each in self.outcomes if each.faults]
        assert not found and not wrong(), (settings, found, wrong())

    def _execute(self, launch, settings, code=None):
        return execute.run(launch, WRITABLE[launch.kernel.program.name], settings, code)

    def sees(self, mutant):
        """What shows that the machine code was changed; empty if nothing does."""
        self.reset()
        for number, launch in enumerate(self.launches):
            code = None
            if number == mutant.launch:
                original = encode.program(launch.kernel.program)
                code = type(original).from_buffer_copy(original)
                for index in range(mutant.index, mutant.index + mutant.count):
                    code[index] = encode.encode(mutant.after, launch.kernel.program.labels)
            # A mutant that runs twice as long as the original has lost its way.
            settings = dataclasses.replace(self.settings, limit=2 * self.outcomes[number].executed)
            outcome = self._execute(launch, settings, code)
            if outcome.faults:
                return outcome.first
        return str(self.wrong() or "")


def _in_both_orders(make, given):
    """Runs of what `make` makes of each of `given`: every other one with its waves backwards, two
    of four without pauses, and with approximate instructions to nearest, up and down."""
    for number, each in enumerate(given):
        settings = execute.Settings(
            backwards=number % 2 == 1, pauses=number % 4 < 2, rounding=(0, 1, -1)[number % 3]
        )
        yield Run(*make(*each), settings)


def region_runs(target, kind, rope, shapes, plan=None, **more):
    """Regions of (tokens, heads, rows that are not padded); the first two with special values too.

    All shapes have to compile to the same machine code.
    """

    def make(shape, hostile):
        tokens, heads, live = shape
        padded = tuple(set(range(tokens)) - set(live))
        call = region.build(region.case(target, tokens, heads, kind, rope, padded=padded, **more))
        if hostile:
            region.hostile(call)
        expected = region.Expected(call)
        with machine(target) as launches:
            query, storage = cases.run(triton, call, plan=plan)

        def reset():
            query.copy_(cases.poisoned(query))
            storage.copy_(call.storage)

        return launches, reset, lambda: expected.wrong(query, storage)

    given = [(shape, False) for shape in shapes] + [(shape, True) for shape in shapes[:2]]
    return list(_in_both_orders(make, given))


def decode_runs(target, *names, portable=False):
    """Decodes and their reductions; only the decodes are mutated."""

    def make(name):
        expected = decode.Expected(target, name)
        with decode.kernel_of(portable), machine(target) as launches:
            attention.launch(expected.inputs)
        plan, inputs = expected.inputs.plan, expected.inputs
        outputs = (inputs.out, inputs.lse, plan.partial_output, plan.partial_lse)

        def reset():
            for output in outputs:
                output.fill_(float("nan"))

        return launches, reset, expected.wrong

    return list(_in_both_orders(make, [(name,) for name in names for _ in range(2)]))


def reduce_runs(target, *names):
    """Reductions of what decodes have left."""

    def make(name):
        expected = decode.Expected(target, name)
        with machine(target) as launches:
            attention.launch(expected.inputs)
        outputs = expected.inputs.out, expected.inputs.lse
        whole = [output.clone() for output in outputs]
        # Tiles that were not split have their result from the decode.

        def reset():
            for output, kept in zip(outputs, whole, strict=True):
                output.copy_(kept)
                output.masked_fill_(expected.split(output), float("nan"))

        return launches[1:], reset, expected.wrong

    return list(_in_both_orders(make, [(name,) for name in names for _ in range(2)]))


def epilogue_runs(target, shape, *steps):
    """Epilogues in one launch each, in both orders of their programs, with pauses and without."""

    def make(step):
        given = epilogue.case(shape, step)
        wide, inputs = epilogue_cases.make(given, lse=True)
        with machine(target) as launches:
            epilogues.launch(inputs, shape)
        plan, want = inputs.plan, epilogue_cases.expected(inputs)

        def reset():
            wide.copy_(poisoned(wide))
            inputs.lse.fill_(epilogue_cases.NOT_WRITTEN)
            plan.epilogue_sums.fill_(float("nan"))
            plan.epilogue_counts.zero_()

        return launches, reset, lambda: epilogue.wrong(inputs, wide, want)

    return list(_in_both_orders(make, [(step,) for step in steps for _ in range(4)]))


def planner_runs(target, *names):
    """Plans of two steps each."""

    def make(name, step):
        want, got = test_planner.plans(name), test_planner.plans(name)
        test_planner.refresh(want, step)
        with machine(target) as launches:
            test_planner.fill(got, step)

        def reset():
            for buffer in (*PLANNED, "planner_scratch"):
                getattr(got, buffer).fill_(test_planner.GARBAGE)

        return launches, reset, lambda: test_planner.different(want, got)

    given = [(name, step) for name in names for step in test_planner.steps(name) for _ in range(2)]
    return list(_in_both_orders(make, given))


def _changed(given, name=None, operands=None, **modifiers):
    """An instruction with another name, operands or modifiers."""
    operands = given.operands if operands is None else tuple(operands)
    name = name or given.name
    modifiers = {**given.modifiers, **modifiers}
    words = [word if value == "" else f"{word}:{value}" for word, value in modifiers.items()]
    text = f"{name} {', '.join(operands)} {' '.join(words)}".strip()
    return dataclasses.replace(given, name=name, operands=operands, modifiers=modifiers, text=text)


def _swapped(given, first, second):
    operands = list(given.operands)
    operands[first], operands[second] = operands[second], operands[first]
    return _changed(given, operands=operands)


def _shifted(given, key, by):
    return _changed(given, **{key: str(int(given.modifiers.get(key, "0"), 0) + by)})


def _negated(given):
    head, relation, kind = re.fullmatch(r"([vs]_cmpk?)_(\w+)_(\w+)", given.name).groups()
    opposite = "lg" if relation == "eq" and head[0] == "s" else _OPPOSITE[relation]
    return _changed(given, name=f"{head}_{opposite}_{kind}")


def _without(given):
    return dataclasses.replace(NOTHING, line=given.line)


def changes(given):
    """(kind, what stands in its place) for every way in which an instruction is mutated."""
    name, modifiers = given.name, given.modifiers
    if name == "s_barrier":
        yield "barrier removed", _without(given)
    elif name == "s_waitcnt":
        yield from _waits(given)
    elif name in REMOVED:
        yield REMOVED[name], _without(given)
    elif name.startswith("v_mfma"):
        yield "matrix product removed", _without(given)
        yield "matrix product's factors exchanged", _swapped(given, 1, 2)
    elif name.startswith("v_cvt_"):
        yield "conversion removed", _without(given)
        if "pk" in name and len(given.operands) > 2 and given.operands[2] != "1.0":
            yield "conversion's halves exchanged", _swapped(given, 1, 2)
    elif given.encoding == "dpp" or re.search("permute|permlane|swizzle", name):
        yield "lanes not moved", _without(given)
        if "row_ror" in modifiers:
            yield "lanes moved elsewhere", _changed(given, row_ror="3")
    elif name.startswith("ds_"):
        yield "LDS access removed", _without(given)
        unit = "offset1" if "2" in name.split("_")[1] else "offset"
        yield "LDS address changed", _shifted(given, unit, 2 if unit == "offset" else 1)
    elif "_store_" in name:
        yield "store removed", _without(given)
        yield "store's offset changed", _shifted(given, "offset", 2)
    elif "_load_" in name:
        yield "load removed", _without(given)
        if name.startswith(("buffer_", "global_")):
            yield "load's offset changed", _shifted(given, "offset", 2)
    elif re.match(r"[vs]_cmp", name):
        yield "comparison negated", _negated(given)
    elif "cndmask" in name or "cselect" in name:
        yield "selection exchanged", _swapped(given, 1, 2)
    elif name.startswith("v_") and not name.startswith(("v_readfirst", "v_accvgpr")):
        yield "arithmetic removed", _without(given)


def _waits(given):
    """Each count one higher, and the wait gone; the largest count of all waits for nothing."""
    real = {
        word: (found[1], int(found[2]))
        for word in given.modifiers
        if (found := re.fullmatch(r"(\w+)\((\d+)\)", word))
        and int(found[2]) < {"vmcnt": 63, "lgkmcnt": 15, "expcnt": 0}[found[1]]
    }
    if real:
        yield "wait removed", _without(given)
    for word, (counter, count) in real.items():
        rest = {key: value for key, value in given.modifiers.items() if key != word}
        weaker = dataclasses.replace(given, modifiers={**rest, f"{counter}({count + 1})": ""})
        text = given.text.replace(word, f"{counter}({count + 1})")
        yield "wait for one fewer", dataclasses.replace(weaker, text=text)


def _barriers(instructions):
    """With how many barriers these begin."""
    return len([*itertools.takewhile(lambda each: each.name == "s_barrier", instructions)])


def candidates(runs):
    """Every mutant of the instructions that some run executes, by kind."""
    found = {}
    for number, launch in enumerate(runs[0].launches[:1]):
        programs = {run.launches[number].kernel.program for run in runs}
        assert len(programs) == 1, "the runs of a subject are of the same machine code"
        counts = sum(run.outcomes[number].counts for run in runs)
        code = launch.kernel.program.instructions
        for index, given in enumerate(code):
            # Of barriers in a row one does what all do: they go together.
            again = index and given.name == code[index - 1].name == "s_barrier"
            if counts[index] and not again:
                for kind, after in changes(given):
                    count = _barriers(code[index:])
                    mutant = Mutant(number, index, kind, given, after, max(1, count))
                    found.setdefault(kind, []).append(mutant)
    return found


def choose(runs, each, seed):
    """Up to `each` mutants of every kind."""
    rng = random.Random(seed)
    return [
        mutant
        for kind, mutants in sorted(candidates(runs).items())
        for mutant in rng.sample(mutants, min(each, len(mutants)))
    ]


def seen(runs, mutant):
    """What shows a mutant in one of the runs, empty if nothing does."""
    return next(filter(None, (run.sees(mutant) for run in runs)), "")
