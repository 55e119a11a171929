"""What vLLM makes of its configs in a process that never sets the flag: `test_unused.py` compares.

    python -m tests.unused MODEL FILE.yaml

Plugins are loaded by their entry points alone, between two sets of configs that vLLM may then
compare, copy and pickle together. Imports nothing of this library.
"""

import copy
import dataclasses
import json
import pickle
import sys

from pydantic import TypeAdapter
from vllm import plugins
from vllm.config import CompilationConfig, PassConfig, VllmConfig
from vllm.config.utils import replace, update_config
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

CASES = {
    "none": lambda: CompilationConfig(),
    "empty": lambda: CompilationConfig(pass_config={}),
    "dictionary": lambda: CompilationConfig(pass_config={"fuse_norm_quant": False}),
    "object": lambda: CompilationConfig(pass_config=PassConfig(eliminate_noops=False)),
}


def main(model, yaml):
    small = {"model": model, "skip_tokenizer_init": True, "max_model_len": 256}
    early = {name: make() for name, make in CASES.items()}
    known = {*sys.modules}
    plugins.load_general_plugins()
    added = [*sys.modules.keys() - known]
    arguments = [EngineArgs(**small, compilation_config=made) for made in early.values()]
    # Here, as a process that only makes arguments has not imported it.
    from vllm.entrypoints.serve.utils.api_utils import log_non_default_args

    for name, made in early.items():
        late = CASES[name]()
        print(name, json.dumps([facts(made, late), facts(late, made)]))
    for given in arguments:
        log_non_default_args(given)
        print(json.dumps(engine_facts(given)))
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    served = EngineArgs.from_cli_args(parser.parse_args(["--config", yaml]))
    print(json.dumps(engine_facts(served)))
    wrapped = hasattr(VllmConfig.__post_init__, "__wrapped__")
    print(json.dumps({"wrapped": wrapped, "modules": added}))


def facts(made, other):
    """Everything that handles a config, done with `made`, and `other` from across the loading."""
    passes = made.pass_config
    return {
        "printed": [repr(made), str(made), repr(passes)],
        "dumped": TypeAdapter(CompilationConfig).dump_json(made).decode(),
        "fields": [field.name for field in dataclasses.fields(passes)],
        "dictionary": dataclasses.asdict(passes),
        "pickled": pickle.dumps(passes).hex(),
        "class": repr(type(pickle.loads(pickle.dumps(made)).pass_config).__mro__),
        "hashes": [passes.compute_hash(), made.compute_hash()],
        "equal": [
            passes == other.pass_config,
            *(copied == passes for copied in (copy.copy(passes), copy.deepcopy(passes))),
            *(replaced(passes) == passes for replaced in (replace, dataclasses.replace)),
        ],
        "updated": repr(update_config(passes, {"fuse_act_quant": True})),
    }


def engine_facts(arguments):
    made = arguments.create_engine_config()
    restored = pickle.loads(pickle.dumps(made))
    return [made.compute_hash(), str(made), restored.compute_hash(), str(restored)]


if __name__ == "__main__":
    main(*sys.argv[1:])
