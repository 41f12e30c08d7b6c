"""Models of Hugging Face transformers: what each can do, weights of folders and of the hub's cache, mistakes in words.

Nothing here reaches the network: opening a connection is an error.
"""

import copy
import json
import math
import shutil
import socket
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import errors
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny import load, loaded, own_task, recipe_file, run, spt_job
from torch import Tensor
from transformers import AutoModel, BertConfig, BertModel, GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

from spt.analysis.resolved import _saved_bytes
from spt.checks import model_contract
from spt.config.job import Job, without_paths
from spt.config.plugins import find_plugin
from spt.config.recipe import Part, Train
from spt.errors import UsageError
from spt.models import hf
from spt.models.base import Context, Unsupported
from spt.models.hf import costs, sizes, trial, weights
from spt.models.hf.backbone import Capabilities, _without_fused_kernels
from spt.models.hf.sizes import round_up
from spt.models.ops import backends
from spt.models.ops.device import planned_device
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.training.build import build_stage
from spt.training.network import SequenceModel
from spt.training.optimizer import optimizer_groups
from spt.training.seeding import seeded
from spt_cli import app


def slow(*names: str) -> list[Any]:
    """Parameters of tests that the slow suite alone runs."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


class Kind(NamedTuple):
    """An architecture as it is tried: with which settings, and which of the two ways it can be."""

    options: dict[str, Any]
    causal: bool = True
    two_sided: bool = True
    dropout: bool = True  # has it any, in so few layers?


CAUSAL = Kind({}, two_sided=False)
PLAIN = Kind({}, two_sided=False, dropout=False)
TWO_SIDED = Kind({}, causal=False)
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}

KINDS = {
    "llama": Kind({}),
    "gpt_neox": Kind({}),
    "bert": Kind({}),
    "modernbert": Kind({}, causal=False),
    "roformer": Kind({}),
    "mamba": PLAIN,
    "mamba2": Kind({"chunk_size": 8}, two_sided=False, dropout=False),
    "xlstm": Kind({"chunk_size": 8}, two_sided=False, dropout=False),
    "recurrent_gemma": Kind({"block_types": ["recurrent", "attention"]}, two_sided=False),
    "longformer": Kind({"attention_window": 8}, causal=False),
    "big_bird": Kind({"block_size": 4, "num_random_blocks": 1}),
    "reformer": Kind({"local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8}, causal=False),
    "nystromformer": Kind({"num_landmarks": 8, "conv_kernel_size": 5}, causal=False),
    "fnet": TWO_SIDED,
}
MORE = {
    **dict.fromkeys(("albert", "bloom", "distilbert", "electra", "eurobert", "gpt2", "modernbert-decoder"), Kind({})),
    **dict.fromkeys(
        ("falcon", "gemma", "gemma3_text", "mistral", "mixtral", "olmo2", "opt", "phi", "qwen3", "roberta"), Kind({})
    ),
    **dict.fromkeys(("convbert", "squeezebert", "xlnet", "yoso"), TWO_SIDED),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "zamba2"), CAUSAL),
    **dict.fromkeys(("gpt_neo", "minimax"), CAUSAL),
    **dict.fromkeys(("falcon_mamba", "lfm2", "olmo_hybrid", "qwen3_next", "rwkv"), PLAIN),
}

PLUG_IN = '''
"""One architecture as a model of its own, so that the contract can be held against it."""
from typing import Any
from pydantic import model_validator
from spt.models.hf import Config as Base, build

class Config(Base):
    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        return {"architecture": NAME, "options": OPTIONS, **given, **FIXED}
'''


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a test tried to open a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def config(**options: Any) -> hf.Config:
    return hf.Config.model_validate_json(json.dumps({"d_model": 16, "n_layers": 2, "max_length": 72, **options}))


def built(name: str, causal: bool = False, seed: int = 0, **options: Any) -> hf.HuggingFace:
    given = {"architecture": name, "causal": causal, "options": (KINDS | MORE)[name].options, **options}
    with seeded(seed, "test"):
        return hf.build(config(**given))


def answer(model: hf.HuggingFace, x: Tensor, valid: Tensor | None = None) -> Tensor:
    every = torch.ones(x.shape[:2], dtype=torch.bool)
    return model(x, Context(every if valid is None else valid, padded=valid is not None))


def x_of(batch: int = 2, length: int = 40, seed: int = 0, width: int = 16) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------- what an architecture can


def hold_to_the_contract(name: str, folder: Path, plug_in: str = PLUG_IN, **able: bool) -> None:
    kind = (KINDS | MORE)[name]._replace(**able)
    path = folder / f"{name.replace('-', '_')}.py"
    fixed = {} if kind.dropout else {"dropout": 0.0}  # the contract asks for dropout, to see it gone in evaluation
    path.write_text(
        plug_in.replace("NAME", repr(name)).replace("OPTIONS", repr(kind.options)).replace("FIXED", repr(fixed))
    )
    found = model_contract.check_contract(find_plugin("models", str(path)))
    assert [(check.name, check.detail) for check in found if not check.ok] == []
    refused = {check.name for check in found if "declared unsupported" in check.detail}
    expected = {"can be built (causal)": kind.causal, "can be built (two-sided)": kind.two_sided}
    assert refused == {way for way, able in expected.items() if not able}


HEAVY = ("mamba", "mamba2", "xlstm", "recurrent_gemma", "longformer", "big_bird", "gpt_neox", "roformer")


@pytest.mark.parametrize("name", [*(name for name in KINDS if name not in HEAVY), *slow(*HEAVY)])
def test_the_contract(name, tmp_path):
    hold_to_the_contract(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_the_contract_of_more(name, tmp_path):
    hold_to_the_contract(name, tmp_path)


@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
def test_relative_attention(name):
    """Two-sided only; gradients reach everything; half precision is kept out where it breaks."""
    model = hf.build(config(architecture=name, options=RELATIVE))
    y = answer(model, x_of(), torch.arange(40).expand(2, -1) < 30)
    (y * x_of(seed=1)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert answer(model.eval(), x_of(), torch.arange(40).expand(2, -1) < 30)[:, :30].isfinite().all()
    with pytest.raises(Unsupported, match=r"looks ahead; set model\.causal=false"):
        hf.build(config(architecture=name, causal=True, options=RELATIVE))


@pytest.mark.parametrize(("name", "fixed"), [("bert", False), ("llama", False), ("longformer", False), ("fnet", True)])
def test_padding_is_masked_where_that_works(name, fixed):
    """Elsewhere every sequence has as many steps."""
    model = built(name)
    assert model.ignores_padding and model.fixed_length == fixed
    assert model.padded_length(9) == (72 if fixed else round_up(9, model.pad_to_multiple_of))


def test_inner_widths_that_are_given_grow_with_the_width():
    given = {"intermediate_size": 96, "num_attention_heads": 2}
    scaled = hf.Config(architecture="gpt_neox", d_model=64, options=given).at_scale("d_model", 96)
    assert scaled == {"d_model": 96, "options.intermediate_size": 144}
    assert hf.Config(d_model=64).at_scale("n_layers", 3) == {"n_layers": 3}
    with pytest.raises(ValueError, match=r"the checkpoint \./here has one size"):
        hf.Config(checkpoint="./here").at_scale("n_layers", 3)


def test_without_options_it_is_a_small_llama():
    model = hf.build(hf.Config(max_length=64))
    assert model.model_type == "llama" and model.config.hidden_size == 128 and model.config.intermediate_size == 512
    assert (model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim) == (4, 4, 32)
    eight = hf.build(config(options={"num_attention_heads": 8})).config
    assert (eight.num_key_value_heads, eight.head_dim) == (8, 2), "what follows from the heads follows them"


@torch.no_grad()
def test_a_decoder_made_two_sided_is_the_formula_without_a_mask():
    model, x = built("llama").eval(), x_of(1, 9)
    layer = model.model.layers[0].self_attn
    hidden = model.model.layers[0].input_layernorm(x)
    seen = {}
    layer.register_forward_hook(lambda _, args, kwargs, out: seen.update(out=out[0]), with_kwargs=True)
    answer(model, x)
    q, k, v = (p(hidden).view(1, 9, 4, 4).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    cos, sin = model.model.rotary_emb(x, torch.arange(9)[None])

    def turn(z):
        return z * cos[:, None] + torch.cat([-z[..., 2:], z[..., :2]], dim=-1) * sin[:, None]

    expected = (turn(q) @ turn(k).transpose(-1, -2) / 2).softmax(-1) @ v
    torch.testing.assert_close(seen["out"], layer.o_proj(expected.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["modernbert", "longformer", "gemma3_text"])
def test_windows_that_hold_padding_alone(name):
    """Steps whose whole window is padding have nothing to look at; what they give must not spread."""
    options = {"gemma3_text": {"sliding_window": 4}}.get(name, KINDS.get(name, Kind({})).options)
    model = built(name, options=options).eval()
    x = x_of(2, 70)
    y = answer(model, x, torch.arange(70).expand(2, -1) < 20)
    assert y[:, :20].isfinite().all()
    assert model_contract.difference(y[:, :20], answer(model, x[:, :20])) < 1e-4


# ------------------------------------------------------------------------------------- two copies of a causal model


BIDIRECTIONAL_PLUG_IN = PLUG_IN.replace("**given", "'bidirectional': not given.get('causal', False), **given")


@pytest.mark.parametrize("name", ["lfm2", *slow("mamba", "mamba2", "xlstm", "rwkv", "gpt_neo", "jamba")])
def test_the_contract_of_two_copies(name, tmp_path):
    """Two-sided, padding included, though the architecture only looks back."""
    hold_to_the_contract(name, tmp_path, BIDIRECTIONAL_PLUG_IN, two_sided=True)


def two_copies(name: str, seed: int = 0, **options: Any) -> hf.Bidirectional:
    model = built(name, seed=seed, bidirectional=True, **options)
    assert isinstance(model, hf.Bidirectional)
    return model


@torch.no_grad()
def test_the_second_copy_reads_each_sequence_backwards():
    """y = f(x) + R(g(R(x))), each sequence as if it were alone."""
    model, x = two_copies("mamba2").eval(), x_of(3)
    lengths = (40, 11, 1)
    y = answer(model, x, torch.arange(40) < torch.tensor(lengths)[:, None])
    for row, length, given in zip(y, lengths, x, strict=True):
        alone = given[None, :length]
        expected = answer(model.forwards, alone) + answer(model.backwards, alone.flip(1)).flip(1)
        torch.testing.assert_close(row[None, :length], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(answer(model, alone), expected)


def test_two_copies_count_twice():
    """Parameters, operations, and those without weight decay; each copy has weights of its own."""
    one, two = built("mamba2", causal=True), two_copies("mamba2")
    assert sum(p.numel() for p in two.parameters()) == 2 * sum(p.numel() for p in one.parameters())
    assert two.flops(40) == 2 * one.flops(40)
    train = Train(steps=1, batch_size=1, learning_rate=0.01, weight_decay=0.05)
    without = [
        {name for group in optimizer_groups(model, train) if not group.weight_decay for name in group.names}
        for model in (one, two)
    ]
    assert without[1] == {f"{copy}.{name}" for copy in ("forwards", "backwards") for name in without[0]}
    states = one.state_dict(), two.forwards.state_dict(), two.backwards.state_dict()
    weight = "model.layers.0.mixer.in_proj.weight"
    assert torch.equal(states[0][weight], states[1][weight]) and not torch.equal(states[1][weight], states[2][weight])
    with torch.device("meta"):
        shapes = two_copies("mamba2")
    assert shapes.flops(40) == two.flops(40) and {p.device.type for p in shapes.parameters()} == {"meta"}


def test_one_copy_and_two_refuse_to_be_rescaled():
    for model in (built("llama"), two_copies("mamba2")):
        with pytest.raises(Unsupported, match="do not know the time between steps"):
            model.rescale(2.0)


def test_two_copies_recomputed_and_at_random():
    model = two_copies("mamba2", d_model=64, initialisation="random", options={"chunk_size": 8})
    for each in (model.forwards, model.backwards):
        assert float(torch.cat([p.detach().flatten() for p in each.parameters()]).std()) == pytest.approx(0.1, rel=0.02)
    model = two_copies("mamba2")
    plain = gradients(model)
    model.recompute = True
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model), strict=True))
    for each in (model.forwards, model.backwards):
        assert any(getattr(module, "gradient_checkpointing", False) is True for module in each.modules())


def test_two_copies_of_a_checkpoint(tmp_path, monkeypatch):
    """Both begin with its weights, and are tried once."""
    settings = {"attention_types": [[["global", "local"], 1]], "vocab_size": 50, "num_heads": 2, "hidden_size": 16}
    theirs = AutoModel.from_config(CONFIG_MAPPING["gpt_neo"](**settings, num_layers=2, max_position_embeddings=72))
    theirs.save_pretrained(tmp_path / "neo")
    tried = []
    capabilities = trial.capabilities
    monkeypatch.setattr(
        trial, "capabilities", lambda model, one: tried.append(one.pretrained) or capabilities(model, one)
    )
    model = from_folder(tmp_path / "neo", causal=False, bidirectional=True)
    assert sorted(tried) == [False, True], "one of them to see that it is not two-sided by itself"
    state = theirs.state_dict()
    for each in (model.forwards, model.backwards):
        assert all(torch.equal(value, state[key]) for key, value in each.model.state_dict().items())
    folder, _ = saved(tmp_path / "pythia")
    with pytest.raises(Unsupported, match="two-sided by itself"):
        from_folder(folder, causal=False, bidirectional=True)


def test_runs_from_before_there_were_two_copies_keep_their_names():
    parts = [Part(name="hf", d_model=4, bidirectional=value) for value in (False, True)]
    assert [without_paths("models", part) for part in parts] == [{"d_model": 4}, {"d_model": 4, "bidirectional": True}]


@pytest.mark.parametrize(
    ("options", "objective"),
    [({"causal": True}, "next"), ({"bidirectional": True}, "masked")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_looks_back_is_pretrained(options, objective, tmp_path):
    """By `next` as it is; by `masked` in both directions. Then it is finetuned."""
    one = {"name": "hf", "architecture": "mamba2", "d_model": 16, "n_layers": 1, "options": {"chunk_size": 8}}
    asked = {"name": objective} | ({"ratio": 0.5} if objective == "masked" else {})
    recipe = own_task(tmp_path, model=one | options, pretrain__objective=asked)
    result = run(Job(recipe, "pretrain", 0), tmp_path / "runs")
    assert result.val and math.isfinite(result.val["loss"])
    result = run(spt_job(recipe), tmp_path / "runs")
    assert result.test is not None and math.isfinite(result.test["loss"])


def test_next_is_not_for_two_directions(tmp_path):
    one = {"name": "hf", "architecture": "mamba2", "d_model": 16, "n_layers": 1, "bidirectional": True}
    recipe = own_task(tmp_path, model=one, pretrain__objective={"name": "next"})
    with pytest.raises(UsageError, match=r"this model looks ahead; set model\.causal=true"):
        build_stage(Job(recipe, "pretrain", 0))


# ------------------------------------------------------------------------------------------------ chance, and its seeds


@pytest.mark.parametrize("name", ["llama", "big_bird", "reformer"])
def test_building_and_answering_leave_chance_alone(name):
    """Weights follow from the seed alone, whether the model has been tried before or not; evaluation draws nothing."""
    states = []
    for _ in range(2):
        numpy = np.random.get_state()[1].copy()
        torch.manual_seed(5)
        state = hf.build(config(architecture=name, options=KINDS[name].options)).state_dict()
        states.append((torch.get_rng_state(), state))
        assert np.array_equal(numpy, np.random.get_state()[1])
        if not states[1:]:
            trial._CACHE.clear()
    assert torch.equal(states[0][0], states[1][0])
    assert all(torch.equal(states[0][1][key], states[1][1][key]) for key in states[0][1])
    model = built(name).eval()
    before, numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    answer(model, x_of())
    assert torch.equal(before, torch.get_rng_state()) and np.array_equal(numpy, np.random.get_state()[1])
    assert huggingface_hub.constants.HF_HUB_OFFLINE is True  # as the tests have it, and it is put back
    with weights._offline():
        pass
    assert huggingface_hub.constants.HF_HUB_OFFLINE is True


def gradients(model: hf.HuggingFace, seed: int = 0) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    (answer(model, x_of()) ** 2 * torch.arange(16.0)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_hashing_is_drawn_anew_in_training_and_follows_the_seed():
    """transformers would take the operating system's seeds for a reversible layer."""
    model = built("reformer", dropout=0.1)
    one, again, other = gradients(model), gradients(model), gradients(model, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    torch.manual_seed(0)
    first, second = answer(model, x_of()), answer(model, x_of())
    assert not torch.equal(first, second), "rotations, and dropout, of two passes are not the same"
    evaluated = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            evaluated.append(answer(model.eval(), x_of()))
    assert torch.equal(*evaluated), "in evaluation they do not follow from what was drawn before"


def test_random_blocks_are_those_of_training():
    """transformers looks at the first block instead in evaluation, which the model was never trained with."""
    model, x = built("big_bird"), x_of(2, 72)
    assert model.config.attention_type == "block_sparse" and model.fixed_length
    with torch.no_grad():
        trained, evaluated = answer(model.train(), x), answer(model.eval(), x)
    torch.testing.assert_close(trained, evaluated)


def test_landmarks_keep_examples_apart():
    """The published iteration divides by a maximum over the batch, and transformers' option against it fails."""
    model = built("nystromformer").eval()
    assert all(m.init_option == "exact" for m in model.modules() if hasattr(m, "init_option"))
    x = x_of(3)
    x[2] *= 50
    with torch.no_grad():
        assert model_contract.difference(answer(model, x)[:2], answer(model, x[:2])) < 1e-5


def test_gates_by_name_only_start_like_gates_no_more():
    ffn = built("xlstm", causal=True).model.blocks[0].ffn
    assert float(ffn.proj_up_gate.weight.detach().std()) == pytest.approx(math.sqrt(2 / (5 * 16)), rel=0.1)


# ------------------------------------------------------------------------------------------------- parameters, training


def test_parameters_are_those_of_pythia():
    """18,915,328 without the tables of words (Biderman et al. 2023, table 1)."""
    options = {
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }
    model = hf.build(config(architecture="gpt_neox", d_model=512, n_layers=6, causal=True, options=options))
    assert sum(p.numel() for p in model.parameters()) == 18_915_328
    assert model.model.rotary_emb.inv_freq.numel() == 8  # pairs: a quarter of a head of 64


@pytest.mark.parametrize("name", ["bert", "longformer", "roformer", "albert", "roberta"])
def test_what_is_never_trained_is_no_parameter(name):
    model = built(name)
    names = [key for key, _ in model.named_parameters()]
    assert not [key for key in names if "word_embeddings" in key or "pooler" in key or "global" in key]
    assert all(p.requires_grad for p in model.parameters())
    assert set(model.state_dict()) <= set(names), "constants are not saved"
    tables = [m for key, m in model.named_modules() if "position" in key and isinstance(m, torch.nn.Embedding)]
    assert all(table.num_embeddings in (72, 73) for table in tables)  # one more where positions begin behind padding's


def test_what_the_code_cannot_do_without_is_frozen():
    model = built("squeezebert")
    assert [key for key, p in model.named_parameters() if not p.requires_grad] == [
        "model.pooler.dense.weight",
        "model.pooler.dense.bias",
    ]


@pytest.mark.parametrize("name", ["llama", "bert", "nystromformer", *slow("mamba2", "xlstm", "recurrent_gemma")])
def test_recomputing_changes_nothing(name):
    model = built(name, causal=not KINDS[name].two_sided)
    plain = gradients(model)
    model.recompute = True
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model), strict=True))
    assert any(getattr(m, "gradient_checkpointing", False) is True for m in model.model.modules())
    model.recompute = False
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model), strict=True))


def test_recomputing_keeps_less():
    def kept(model):
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.update({id(t): t.numel()}) or t, lambda t: t):
            answer(model, x_of(4, 64))
        return sum(sizes.values())

    model = built("llama", n_layers=4)
    plain = kept(model)
    model.recompute = True
    assert kept(model) < plain / 2


@torch.no_grad()
@pytest.mark.parametrize("name", ["albert", "reformer", "zamba2"])
def test_weights_are_saved_and_loaded_strictly(name, tmp_path):
    """Also where several layers share them: once, under the first name."""
    options = {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]} if name == "zamba2" else {}
    kind = (KINDS | MORE)[name]
    given = {"n_layers": 4, "options": kind.options | options}
    one, two = (built(name, not kind.two_sided, seed, **given) for seed in (0, 1))
    save_file(one.state_dict(), tmp_path / "model.safetensors")
    assert set(one.state_dict()) == {key for key, _ in one.named_parameters()}
    copied = copy.deepcopy(two)
    for model in (two, copied):
        assert model_contract.difference(answer(model.eval(), x_of()), answer(one.eval(), x_of())) > 1e-3
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
        assert torch.equal(answer(model, x_of()), answer(one, x_of()))


def test_who_decays():
    """Matrices; neither biases and norms, nor tables of positions, nor a state matrix."""
    train = Train(steps=1, batch_size=1, learning_rate=0.01, weight_decay=0.05)
    for name, never, ever in (
        ("bert", ("bias", "LayerNorm.weight", "embeddings.weight"), "query.weight"),
        ("mamba", ("A_log", "bias", "norm.weight", ".D"), "in_proj.weight"),
        ("rwkv", ("time_mix_key", "time_decay"), "receptance.weight"),
    ):
        model = built(name, causal=not (KINDS | MORE)[name].two_sided)
        decaying = [key for group in optimizer_groups(model, train) if group.weight_decay for key in group.names]
        assert any(key.endswith(ever) for key in decaying) and not any(key.endswith(never) for key in decaying)


def test_random_prior():
    model = built("llama", d_model=64, initialisation="random")
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert float(flat.std()) == pytest.approx(0.1, rel=0.02) and float(flat.abs().max()) < 0.7


# ----------------------------------------------------------------------------------------------------------- operations


@pytest.mark.parametrize("name", ["llama", "bert", "convbert", *slow("mamba2", "longformer", "reformer", "xlstm")])
def test_operations_are_those_that_torch_counts(name):
    kind = (KINDS | MORE)[name]
    model = built(name, causal=not kind.two_sided, max_length=200).eval()
    for length in (5, 64, 199):
        assert model.flops(length).forward == pytest.approx(model_contract.counted_flops(model, length), rel=1e-6)


def test_operations_are_counted_of_a_network_without_values():
    """On the meta device, where packaged recipes are built without their data. A Longformer asks for a value: has any
    step global attention?"""
    model = built("longformer")
    with torch.device("meta"):
        without = built("longformer")
    assert without.flops(64).forward == model.flops(64).forward > 0


def test_gradients_outlive_the_count_of_operations(monkeypatch):
    """A reversible stack adds to them in its own backward pass."""
    monkeypatch.setattr(costs, "_POLYNOMIALS", {})
    monkeypatch.setattr(costs, "_COUNTS", {})
    model = built("reformer").train()
    answer(model, x_of()).sum().backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    assert model.flops(40).forward > 0
    assert all(p.grad is before[name] for name, p in model.named_parameters())


@pytest.mark.slow
def test_operations_are_counted_without_kernels_of_other_packages(monkeypatch):
    """Which take no tensors without values, and would count nothing."""
    package = types.ModuleType("fused")
    package.square = lambda x: x.no_such_kernel
    monkeypatch.setitem(sys.modules, "fused", package)
    square = use_kernel_func_from_hub_with_fallback("square", "fused")(lambda x: x * x)
    with pytest.raises(AttributeError, match="no_such_kernel"):
        square(torch.ones(2))
    with _without_fused_kernels():
        assert square(torch.ones(2)).tolist() == [1, 1]
    with pytest.raises(AttributeError):
        square(torch.ones(2))


def test_operations_that_torch_does_not_see():
    """By hand. Two of eight experts a step, three maps of D to 4 D each, and the router; a selective scan: 6 E N a
    step and layer, E = 2 D; a Fourier transform of n numbers: 5 n log2 n."""
    attention = 2 * (8 * 50 * 16**2 + 4 * 50**2 * 16)
    assert built("mixtral").flops(50).forward == attention + 2 * 2 * 50 * 16 * (8 + 2 * 3 * 64)
    mamba = built("mamba", causal=True)
    assert mamba.flops(50).forward - model_contract.counted_flops(mamba, 50) == 2 * 6 * 50 * 32 * 16
    fnet = built("fnet")
    assert fnet.flops(50).forward - model_contract.counted_flops(fnet, 50) == pytest.approx(
        2 * 5 * 72 * 16 * math.log2(72 * 16)
    )


@pytest.mark.parametrize("name", slow("recurrent_gemma", "qwen3_next"))
def test_long_sequences_are_not_gone_through_to_be_counted(name, monkeypatch):
    """Their code is a loop over steps or chunks."""
    lengths = []
    count = costs.count
    monkeypatch.setattr(costs, "count", lambda model, length: lengths.append(length) or count(model, length))
    model = built(name, causal=True, max_length=16_384)
    assert 1.9 < model.flops(16_384).forward / model.flops(8_192).forward < 4
    assert max(lengths) <= 1_300 and len(lengths) <= 12


# ------------------------------------------------------------------------------------------------------ in the pipeline


@pytest.mark.parametrize(
    "name", ["bert", "fnet", "reformer", *slow("longformer", "big_bird", "nystromformer", "jamba")]
)
def test_shown_without_values(name, tmp_path, monkeypatch):
    """The memory estimate of large networks runs on tensors that have none, with padding."""
    monkeypatch.setattr("spt.analysis.resolved.RUN_FLOPS", 0)
    small = {
        "longformer": {"attention_window": 4},
        "big_bird": {"block_size": 1, "num_random_blocks": 1},
        "reformer": {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
        "nystromformer": {"num_landmarks": 4, "conv_kernel_size": 3},
    }
    one = {"name": "hf", "architecture": name, "d_model": 16, "n_layers": 2, "options": small.get(name, {})}
    setup = build_stage(Job(own_task(tmp_path, model={**one, "causal": name == "jamba"}), "pretrain", 0))
    assert _saved_bytes(setup, 8) > 0


@pytest.mark.parametrize("name", ["modernbert", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_a_comparison_end_to_end(name, tmp_path):
    """Both arms from the command line, sequences of different lengths, nothing said by transformers."""
    one = {"name": "hf", "architecture": name, "d_model": 16, "n_layers": 1, "causal": name == "mamba2"}
    own_task(tmp_path)
    recipe = recipe_file(tmp_path, task={"name": "./toy.py"}, model=one)
    arguments = ["compare", recipe, "--smoke", "--seeds", 1, "--json", "--cpu", "--out", tmp_path / "runs"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["model"] == "hf" and row["delta"] is not None


def test_bfloat16_and_recomputing_in_a_run(tmp_path):
    settings = {"steps": 4, "batch_size": 8, "learning_rate": 0.01, "precision": "bf16"}
    one = {"name": "hf", "architecture": "big_bird", "d_model": 16, "n_layers": 1}
    one |= {"options": {"block_size": 1, "num_random_blocks": 1}, "dropout": 0.1}
    job = Job(own_task(tmp_path, model=one, finetune={"train": settings}), "finetune", 0)
    result = run(job, tmp_path / "runs", recompute=True, micro_batch_size=3)
    assert result.test is not None and math.isfinite(result.test["loss"])


@torch.no_grad()
def test_the_choice_of_attention_reaches_it(monkeypatch):
    model, x = built("llama").eval(), x_of()
    fused = answer(model, x)
    with backends.use("math", "attention"):
        torch.testing.assert_close(answer(model, x), fused, atol=1e-5, rtol=1e-4)
        assert model.config._attn_implementation == "eager"
    answer(model, x)
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.setattr(backends, "current", lambda choice: "flash")
    with pytest.raises(backends.Unavailable, match=r"half precision; set train\.precision=bf16"):
        answer(model, x)
    answer(built("fnet").eval(), x)  # has no attention, and none to choose


# --------------------------------------------------------------------------------------------------- weights from files


def saved(folder: Path, seed: int = 0, **settings: Any) -> tuple[Path, GPTNeoXForCausalLM]:
    """A tiny Pythia as transformers saves it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(seed)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**{**sizes, "vocab_size": 50, "max_position_embeddings": 64, **settings}))
    model.save_pretrained(folder)
    return folder, model.eval()


def from_folder(folder: Path, **options: Any) -> hf.HuggingFace:
    return hf.build(config(**{"checkpoint": str(folder), "causal": True, **options}))


def test_loading_leaves_devices_as_they_are(tmp_path):
    """Whatever is first in a process to use a device: what makes tensors makes them there afterwards."""
    folder, _ = saved(tmp_path / "pythia")
    torch.utils._device._device_constructors.cache_clear()  # as at a process's start
    from_folder(folder)
    with torch.device("meta"):
        assert torch.linspace(0, 1, 3).is_meta and torch.zeros(2).is_meta


def test_a_local_checkpoint_is_loaded_as_it_is(tmp_path, capfd):
    folder, theirs = saved(tmp_path / "pythia")
    ours, x = from_folder(folder), x_of()
    assert ours.training and all(p.dtype == torch.float32 for p in ours.parameters())
    state = {key.removeprefix("gpt_neox."): value for key, value in theirs.state_dict().items()}
    for key, value in ours.model.state_dict().items():
        assert torch.equal(value, state[key]), key
    with torch.no_grad():
        expected = theirs.gpt_neox(inputs_embeds=x).last_hidden_state
        torch.testing.assert_close(answer(ours.eval(), x), expected)
        random = from_folder(folder, pretrained=False).eval()
        assert model_contract.difference(answer(random, x), expected) > 0.01
    assert {k: v.shape for k, v in random.state_dict().items()} == {k: v.shape for k, v in ours.state_dict().items()}
    assert capfd.readouterr() == ("", "")


def test_half_precision_and_old_names_of_settings(tmp_path):
    """As the published Pythia has them: float16, rotary_pct, torch_dtype."""
    folder, theirs = saved(tmp_path / "pythia")
    theirs.half().save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    del stored["rope_parameters"], stored["dtype"]
    stored |= {"rotary_pct": 0.5, "rotary_emb_base": 5000, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(stored))
    ours = from_folder(folder)
    assert next(ours.parameters()).dtype == torch.float32
    assert ours.config.rope_parameters["partial_rotary_factor"] == 0.5
    assert ours.config.rope_parameters["rope_theta"] == 5000
    assert ours.model.rotary_emb.inv_freq.numel() == 2


def test_a_decoder_with_weights_can_be_two_sided(tmp_path):
    folder, _ = saved(tmp_path / "pythia")
    model = from_folder(folder, causal=False).eval()
    x = x_of()
    with torch.no_grad():
        assert model_contract.difference(answer(model, x)[:, :9], answer(model, x[:, :9])) > 1e-3


def test_dropout_is_the_recipes(tmp_path):
    folder, _ = saved(tmp_path / "pythia", hidden_dropout=0.3)
    assert from_folder(folder).config.hidden_dropout == 0.0
    assert from_folder(folder, dropout=0.2).config.attention_dropout == 0.2
    mixed = from_folder(folder, dropout=0.2, options={"attention_dropout": 0.0})
    assert (mixed.config.hidden_dropout, mixed.config.attention_dropout) == (0.2, 0.0)


def test_learned_positions_of_a_checkpoint(tmp_path):
    """Enough, or refused; with random weights there are as many as are needed."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(**sizes, vocab_size=50, max_position_embeddings=40)).save_pretrained(tmp_path / "bert")
    given = {"causal": False, "max_length": 40}
    assert from_folder(tmp_path / "bert", **given).length == 40
    with pytest.raises(ValueError, match="has positions for 40 steps, but max_length is 41"):
        from_folder(tmp_path / "bert", causal=False, max_length=41)
    more = from_folder(tmp_path / "bert", causal=False, max_length=41, pretrained=False)
    assert more.model.embeddings.position_embeddings.num_embeddings == 41


@pytest.mark.parametrize("name", ["longformer", "reformer", "big_bird", "nystromformer", "roformer"])
@pytest.mark.slow
def test_efficient_transformers_with_weights(name, tmp_path):
    """Their structure is that of the checkpoint; how long sequences may be is said by its positions."""
    made = CONFIG_MAPPING[name]
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50, "initializer_range": 0.5}
    sizes |= {} if name == "reformer" else {"num_hidden_layers": 2, "intermediate_size": 32}
    own = {
        "longformer": {"attention_window": [8, 16], "max_position_embeddings": 66},  # two of them before the first step
        "reformer": {
            **{"attn_layers": ["local", "lsh"], "attention_head_size": 8, "axial_pos_shape": [8, 8]},
            **{"axial_pos_embds_dim": [4, 12], "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8},
        },
        "big_bird": {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 64},
        "nystromformer": {"num_landmarks": 8, "max_position_embeddings": 64, "conv_kernel_size": 5},
        "roformer": {"max_position_embeddings": 64},
    }[name]
    theirs = AutoModel.from_config(made(**sizes, **own))
    theirs.save_pretrained(tmp_path / name)
    given = {"causal": False, "max_length": 60}
    ours = from_folder(tmp_path / name, **given)
    state = theirs.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in ours.model.state_dict().items())
    x = x_of(2, 50)
    (answer(ours, x) * x_of(2, 50, seed=1)).sum().backward()
    assert all(p.grad is not None for p in ours.parameters() if p.requires_grad)
    with torch.no_grad():
        assert model_contract.difference(answer(ours.eval(), x)[:1], answer(ours, x[:1])) < 1e-4
    assert ours.flops(50).forward > 0
    with pytest.raises(ValueError, match=r"positions for 64 steps, but max_length is 65|is made for 64 steps"):
        from_folder(tmp_path / name, causal=False, max_length=65)


def snapshot(cache: Path, name: str, source: Path, commit: str = "c" * 40, revision: str = "main") -> Path:
    """A copy of a model on the hub, as its client keeps it."""
    place = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(source, place / "snapshots" / commit)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / revision).write_text(commit)
    return place / "snapshots" / commit


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_model_of_the_hub_from_its_cache(tmp_path, cache):
    folder, theirs = saved(tmp_path / "pythia")
    snapshot(cache, "somebody/pythia", folder)
    other, _ = saved(tmp_path / "other", seed=1)
    snapshot(cache, "somebody/pythia", other, "d" * 40, "step1000")
    given = {"checkpoint": "somebody/pythia", "causal": True}
    dense = "layers.0.attention.dense.weight"
    assert torch.equal(hf.build(config(**given)).model.state_dict()[dense], theirs.state_dict()[f"gpt_neox.{dense}"])
    assert hf.identity(config(**given)) == {"commit": "c" * 40}
    step = config(**given, revision="step1000")
    assert hf.identity(step) == {"commit": "d" * 40}
    assert not torch.equal(hf.build(step).model.state_dict()[dense], theirs.state_dict()[f"gpt_neox.{dense}"])
    for missing in ({"checkpoint": "somebody/else"}, {"revision": "step2"}):
        with pytest.raises(ValueError, match="is not on this machine; get it with: spt data prepare RECIPE"):
            hf.build(config(**given | missing))
        assert hf.identity(config(**given | missing)) == {}


def test_a_run_is_known_by_the_weights_it_starts_from(tmp_path):
    saved(tmp_path / "here")
    one = {"name": "hf", "checkpoint": "./here", "d_model": 16, "n_layers": 2, "causal": True}

    def name(**options: Any) -> str:
        return Job(load(str(recipe_file(tmp_path, model=one | options))), "finetune", 0).name

    first = name()
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert name(checkpoint=str(tmp_path / "there")) == first
    assert name(pretrained=False) != first
    saved(tmp_path / "here", seed=1)
    assert name() not in (first, name(pretrained=False))
    result = run(spt_job(loaded(tmp_path, model=one)), tmp_path / "runs")
    assert result.test is not None and result.model == "hf"


def test_finetuning_starts_from_the_weights(tmp_path):
    _, theirs = saved(tmp_path / "here")
    one = {"name": "hf", "checkpoint": "./here", "d_model": 16, "n_layers": 2, "causal": True}
    model = build_stage(Job(loaded(tmp_path, model=one), "finetune", 0)).model
    assert isinstance(model, SequenceModel)
    key = "layers.1.mlp.dense_h_to_4h.weight"
    assert torch.equal(model.state_dict()[f"backbone.model.{key}"], theirs.state_dict()[f"gpt_neox.{key}"])


# ------------------------------------------------------------------------------------------------------------- fetching


def test_fetching_asks_for_settings_and_safetensors_alone(tmp_path, cache, monkeypatch, messages):
    folder, _ = saved(tmp_path / "pythia")
    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(snapshot(cache, name, folder))

    monkeypatch.setattr(weights, "snapshot_download", download)
    one = config(checkpoint="somebody/pythia", causal=True)
    hf.fetch(one)
    patterns = ["config.json", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
    assert asked == [("somebody/pythia", None, patterns)] and len(messages) == 1
    hf.fetch(one)
    hf.fetch(config(checkpoint=str(folder), causal=True))
    hf.fetch(config())
    assert len(asked) == len(messages) == 1, "what is there, and what is not on the hub, is not fetched"
    assert hf.build(one).model.config.hidden_size == 16


def unanswered(kind: type[Exception]) -> Exception:
    return kind.__new__(kind)  # those of the hub's client want the server's answer


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (unanswered(errors.GatedRepoError), "is gated: ask for access"),
        (unanswered(errors.RepositoryNotFoundError), "the hub has no model somebody/pythia, or it is private"),
        (unanswered(errors.RevisionNotFoundError), "has no revision first"),
        (errors.LocalEntryNotFoundError("no connection"), "the Hugging Face hub cannot be reached"),
        (errors.OfflineModeIsEnabled("offline"), "the Hugging Face hub cannot be reached"),
        (OSError("No space left on device"), "cannot be fetched: No space left on device"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_can_go_wrong_is_said_in_words(error, words, cache, monkeypatch):
    def download(*_, **__):
        raise error

    monkeypatch.setattr(weights, "snapshot_download", download)
    with pytest.raises(ValueError, match=words):
        hf.fetch(config(checkpoint="somebody/pythia", revision="first", causal=True))


def test_without_a_network_it_says_so(cache, tmp_path, monkeypatch):
    """The real client, offline; and the command that fetches, in one sentence."""
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))  # wherever home is
    with pytest.raises(ValueError, match="the Hugging Face hub cannot be reached"):
        hf.fetch(config(checkpoint="somebody/pythia", causal=True))
    recipe = recipe_file(tmp_path, model={"name": "hf", "checkpoint": "somebody/pythia", "causal": True})
    done = CliRunner().invoke(app, ["data", "prepare", str(recipe)])
    assert done.exit_code == 3 and "cannot be reached" in done.stderr, done.stderr
    done = CliRunner().invoke(app, ["show", str(recipe)])
    assert done.exit_code == 2 and "get it with: spt data prepare RECIPE" in done.stderr, done.stderr


def test_a_repository_of_pickles_is_no_source(tmp_path, cache, monkeypatch):
    folder, _ = saved(tmp_path / "pythia")
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(weights, "snapshot_download", lambda name, **_: str(snapshot(cache, name, folder)))
    with pytest.raises(ValueError, match=r"somebody/pythia lacks model\.safetensors"):
        hf.fetch(config(checkpoint="somebody/pythia", causal=True))


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "lama"}, "'lama' is no architecture of transformers; did you mean llama?"),
        ({"architecture": "qqqqqq"}, "code from the hub is not run"),
        ({"architecture": "bert", "checkpoint": "./x"}, "give one of them"),
        ({"architecture": None}, "give one of them"),
        ({"checkpoint": None}, "give one of them"),
        ({"architecture": "t5"}, "is an encoder-decoder model"),
        ({"architecture": "bart"}, "is an encoder-decoder model"),
        ({"architecture": "clip"}, "does not take one sequence of embeddings"),
        ({"architecture": "mra"}, "are not run here"),
        ({"architecture": "bert", "options": {"num_heads": 2}}, "bert has no num_heads; did you mean num_attention"),
        ({"architecture": "gpt2", "options": {"n_embd": 8}}, "options.n_embd is not set here: model.d_model says it"),
        ({"options": {"num_hidden_layers": 3}}, "model.n_layers says it"),
        ({"options": {"max_position_embeddings": 3}}, "model.max_length says it"),
        ({"options": {"num_attention_heads": "four"}}, "expected int, got str"),
        ({"d_model": 10, "options": {"num_attention_heads": 4}}, "(10) is not a multiple of the number of att"),
        ({"norm": "batch"}, "norm has no effect on a model of transformers"),
        ({"prenorm": False}, "prenorm has no effect"),
        ({"feed_forward": "mlp"}, "feed_forward has no effect"),
        ({"tie_dropout": True}, "tie_dropout has no effect"),
        ({"initialisation": "random_ssm"}, "use random"),
        ({"bidirectional": True, "causal": True}, "bidirectional makes a causal model two-sided; leave it out or set"),
        ({"checkpoint": "a/b", "initialisation": "random"}, "set pretrained: false"),
        ({"pretrained": True}, "pretrained has no effect without a checkpoint"),
        ({"revision": "main"}, "revision has no effect without a checkpoint"),
        ({"checkpoint": "./a", "revision": "main"}, "revision has no effect on a folder"),
        ({"checkpoint": "a/b/c"}, "is neither a model on the hub (owner/name) nor a folder"),
        ({"architecture": "big_bird", "options": {"attention_type": "block_sparse"}}, "needs more than 704 steps"),
    ],
)  # fmt: skip
def test_mistakes_in_a_recipe(options, words):
    with pytest.raises(ValidationError) as caught:
        config(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "vit"}, "does not take one sequence of embeddings"),
        ({"architecture": "mamba2", "causal": True, "dropout": 0.1}, "dropout has no effect on architecture mamba2"),
        ({"architecture": "mamba2"}, f"has layers that only look back; {trial.BOTH_WAYS}"),
        ({"architecture": "rwkv"}, f"only looks back; {trial.BOTH_WAYS}"),
        ({"architecture": "llama", "bidirectional": True}, "two-sided by itself; leave out model.bidirectional"),
        ({"architecture": "longformer", "bidirectional": True}, "two-sided by itself; leave out model.bidirectional"),
        ({"architecture": "mamba", "bidirectional": True, "dropout": 0.1}, "dropout has no effect on architecture"),
        ({"architecture": "longformer", "causal": True}, "looks ahead; set model.causal=false"),
        ({"architecture": "reformer", "causal": True}, "the hashes of later steps decide what a step sees"),
        ({"architecture": "modernbert", "causal": True}, "looks ahead; set model.causal=false"),
        ({"checkpoint": "./nowhere"}, "the checkpoint ./nowhere is not a folder"),
    ],
)
def test_what_is_found_when_it_is_built(options, words):
    with pytest.raises(ValueError, match=words):
        hf.build(config(**options))


def test_sizes_that_do_not_follow_from_the_recipe_are_refused():
    """An architecture's own defaults, not what options ask for."""
    large = {"architecture": "kimi_linear", "causal": True, "d_model": 64}
    words = r"would have 54,932,096 parameters .* 419 times as many .*moe_intermediate_size \(1,024\)"
    asked = {"num_local_experts": 4, "moe_intermediate_size": 64, "kv_lora_rank": 16}
    with torch.device("meta"):
        with pytest.raises(ValueError, match=words) as caught:
            hf.build(config(**large))
        assert "num_local_experts (256)" in str(caught.value)
        made = hf.build(config(**large, options=asked))
        hf.build(config(architecture="gpt_oss", causal=True, d_model=64))  # 128 experts, whose width follows
    assert sum(parameter.numel() for parameter in made.parameters()) < 8e6
    one = {"d": 64, "n": 2}
    assert sizes.plain_parameters(**one, options={}) == 2 * 16 * 64 * 64
    assert sizes.plain_parameters(**one, options={"num_experts": 9, "moe_intermediate_size": 16, "head_dim": 300}) == (
        2 * 64 * (4 * 64 + 3 * 300 * 9)
    )


def test_a_model_is_tried_where_it_will_run(monkeypatch):
    """Here on a device without values; the model itself stays where it is, with its weights."""
    found = []

    def run(self):
        model = self.backbone
        found.extend([self.x.device.type, self.other.device.type, *{p.device.type for p in model.parameters()}])
        return Capabilities(False, True, False, (), ())

    monkeypatch.setattr(trial, "planned_device", lambda: torch.device("meta"))
    monkeypatch.setattr(trial, "_CACHE", {})
    monkeypatch.setattr(trial._Trial, "run", run)
    there = built("llama")
    assert found == ["meta"] * 3 and all(p.device.type == "cpu" for p in there.parameters())
    assert [key.split()[0] for key in trial._CACHE] == ["meta"]
    monkeypatch.setattr(trial, "planned_device", lambda: torch.device("cpu"))
    here = built("llama")
    assert found[3:] == ["cpu"] * 3 and all(map(torch.equal, here.state_dict().values(), there.state_dict().values()))


def test_the_device_to_come_is_the_runtimes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for cpu, device in ((False, "cuda"), (True, "cpu")):
        Runtime(Settings(quiet=True, cpu=cpu))
        assert planned_device().type == device


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mamba2", "bert"])
def test_kernels_of_a_gpu_are_not_refused(name, monkeypatch):
    """A model that takes no tensors of a CPU; it can do what it can do there."""
    here = built(name, causal=name == "mamba2")
    forward = hf.HuggingFace.forward

    def on_a_gpu_only(self, x, context):
        if not (x.is_cuda or x.is_meta):
            raise RuntimeError("Expected x.is_cuda() to be true, but got false")
        return forward(self, x, context)

    monkeypatch.setattr(hf.HuggingFace, "forward", on_a_gpu_only)
    Runtime(Settings(quiet=True))
    try:
        there = built(name, causal=name == "mamba2")
    finally:
        Runtime(Settings(quiet=True, cpu=True))
    assert there.state_dict().keys() == here.state_dict().keys() and next(there.parameters()).device.type == "cpu"
    for key in ("fixed_length", "ignores_padding", "single_precision"):
        assert getattr(there, key) == getattr(here, key)


@pytest.mark.parametrize(
    ("spoil", "options", "words"),
    [
        (lambda folder: None, {"d_model": 32}, "another size; set model.d_model=16 and model.n_layers=2"),
        (lambda folder: None, {"n_layers": 3}, "another size; set model.d_model=16 and model.n_layers=2"),
        (
            lambda folder: None,
            {"options": {"intermediate_size": 64}},
            "weights of other sizes than its config.json",
        ),
        (lambda folder: None, {"options": {"intermdiate_size": 64}}, "did you mean intermediate_size?"),
        (lambda folder: (folder / "config.json").unlink(), {}, "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), {}, "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), {}, "it holds no settings"),
        (lambda folder: (folder / "config.json").write_text("{}"), {}, "'None' is no architecture of transformers"),
        (lambda folder: edit(folder, model_type="theirs", auto_map={"AutoConfig": "x.Y"}), {}, "'theirs' is no arch"),
        (lambda folder: edit(folder, quantization_config={"bits": 4}), {}, "quantised weights"),
        (lambda folder: edit(folder, num_attention_heads=3), {}, "is not divisible by the number of attention heads"),
        (lambda folder: (folder / "model.safetensors").unlink(), {}, "lacks model.safetensors; set pretrained: false"),
        (lambda folder: pickled(folder), {}, "in a format that can contain programs, which is never opened"),
        (lambda folder: cut(folder), {}, "model.safetensors cannot be read"),
        (lambda folder: lessen(folder), {}, "the checkpoint lacks weights of this model, among them layers.1"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), {}, "is an adapter"),
        (lambda folder: index(folder), {}, "lacks model-00002-of-00002.safetensors"),
        (lambda folder: index(folder, "{"), {}, "model.safetensors.index.json cannot be read"),
    ],
)
def test_a_checkpoint_that_cannot_be_used(spoil, options, words, tmp_path):
    folder, _ = saved(tmp_path / "pythia")
    spoil(folder)
    with pytest.raises(ValueError) as caught:
        from_folder(folder, **options)
    assert words in str(caught.value) and "\n" not in str(caught.value).partition("[type")[0].strip()
    assert isinstance(hf.identity(config(**{"checkpoint": str(folder), "causal": True} | options)), dict)


def edit(folder: Path, **changes: Any) -> None:
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | changes))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def lessen(folder: Path) -> None:
    kept = {k: v for k, v in load_file(folder / "model.safetensors").items() if "layers.1.mlp" not in k}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def index(folder: Path, text: str = "") -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(text or json.dumps({"weight_map": names}))


def test_code_of_a_checkpoint_is_never_run(tmp_path):
    """A folder that names code of its own for a known kind of model is read by transformers' own class."""
    folder, _ = saved(tmp_path / "pythia")
    (folder / "theirs.py").write_text("raise SystemExit('run')\n")
    edit(folder, auto_map={"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model"})
    assert type(from_folder(folder).model).__module__.startswith("transformers.")
