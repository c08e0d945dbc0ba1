"""QaRL inside verl: the TBPO loss, the quantized FSDP engine, the weight receiver in vLLM's workers, the CPU platform.

verl loads `plugin.py`. `docs/verl.md` tells verl users how to enable each part and which extension point of verl it
uses. Nothing here changes verl unless verl's configuration asks for it.
"""
