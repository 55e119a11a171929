"""What an operator set for the flag although the flag is off: one warning names each."""

import logging
import weakref
from typing import Any

from mla_fusion import config

logger = logging.getLogger("vllm.mla_fusion")

# Compilation configs whose operator was told all there is to tell of a flag that is off, by id:
# other configs of an engine, as a draft model's, are made with the same one.
_told: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def is_told(compilation: Any) -> None:
    """The operator of `compilation` was told that its flag is off."""
    _told[id(compilation)] = compilation


def warn(vllm_config: Any, sparse: bool) -> None:
    """Name the threshold and the options of a config whose flag is off, once.

    sparse: this library's sparse decode reads the options, which it does without the flag.
    """
    compilation, given = vllm_config.compilation_config, vllm_config.additional_config
    if id(compilation) in _told:
        return
    is_told(compilation)
    unused = []
    if getattr(compilation.pass_config, config.THRESHOLD, None) is not None:
        unused.append(config.THRESHOLD)
    if isinstance(given, dict) and config.OPTIONS_KEY in given and not sparse:
        unused.append(f'additional_config["{config.OPTIONS_KEY}"]')
    for name in unused:
        logger.warning(
            "mla-fusion: %s has no effect without pass_config.%s: set both", name, config.FLAG
        )
