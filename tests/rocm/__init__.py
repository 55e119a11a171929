"""vLLM's ROCM_AITER_MLA backend on a CPU, over the double of AITER.

imitation.py      what of vLLM's ROCm platform is imitated; all of it
steps.py          batches, cases and single steps of one MLA layer: vLLM's metadata builder, layer
                  and backend, and its graph before and after this library's passes
work.py           what a child process makes of cases and of an engine, and `watch.py` of plans
test_steps.py     the steps over a matrix of batches, head counts and caches
test_engine.py    whole engines with the flag and without
"""
