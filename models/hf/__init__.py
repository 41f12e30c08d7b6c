"""Any language model of Hugging Face transformers (llama, bert, mamba2, longformer, …), random or pretrained.

Wolf et al. 2020. The model replaces the residual stack: it takes embeddings (B, L, D) and returns its last hidden
states,

    y = architecture(inputs_embeds=x).last_hidden_state

Encoder and head are ours; its token embeddings are dropped. What a model can do is found by running it on a few
steps when it is built: whether it looks ahead, whether it keeps examples and padding apart, which of its parameters are
used. docs/hugging-face.md has the results. A model that only looks back becomes two-sided with a second copy
(`bidirectional`).

Only `fetch` downloads anything, code from the hub is never run, and weights are read from safetensors only.

In reading order: sizes (what architectures need), config (the options), weights (checkpoints), backbone (the model in
our network), changes (what is corrected in it), bidirectional (two copies), trial (what it can do), unused (parameters
it does without), costs (its operations).
"""

from spt.models.base import Backbone
from spt.models.hf import trial
from spt.models.hf.backbone import HuggingFace
from spt.models.hf.bidirectional import Bidirectional
from spt.models.hf.config import Config, check_size
from spt.models.hf.weights import fetch, identity

PAPER = "Wolf et al. 2020"
COST = "L² D + L D²"  # of a Transformer such as the default
PARAMETERS = 1_049_728

__all__ = ["Bidirectional", "Config", "HuggingFace", "build", "fetch", "identity"]


def build(config: Config) -> Backbone:
    one_way = config.one_way
    copies = [HuggingFace(one_way) for _ in range(2 if config.bidirectional else 1)]
    check_size(copies[0], one_way)
    if not any(parameter.is_meta for parameter in copies[0].parameters()):  # else shapes are enough, and all there is
        if config.bidirectional:
            trial.check_one_sided(copies[0], config)
        capabilities = trial.capabilities(copies[0], one_way)
        for model in copies:
            model.configure(capabilities)
            model.initialise(config.initialisation)
    return Bidirectional(config, *copies) if config.bidirectional else copies[0]
