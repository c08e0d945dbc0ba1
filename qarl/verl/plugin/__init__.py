"""QaRL inside verl: the TBPO loss, the quantized FSDP engine, the weight receiver in vLLM's workers, the CPU platform.

`plugin.py` is what verl loads; `docs/verl.md` says how a verl user switches things on and which of verl's extension
points each part uses. Nothing here changes verl unless its configuration asks for it.
"""
