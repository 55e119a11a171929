"""What vLLM imports in every worker: the imitation that decode context parallelism needs."""

from tests.coverage import imitations

imitations.parts_of_a_cache()


class Worker:
    """Adds nothing to the worker."""
