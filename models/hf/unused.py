"""Parameters of a model that its output does not depend on, and what of them can be removed.

Letters: B sequences, L steps, D width.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from spt.models.hf.backbone import HuggingFace, outputs
from spt.models.hf.changes import remove


def unused_parameters(backbone: HuggingFace, x: Float[Tensor, "B L D"]) -> set[str]:
    """Parameters without a gradient. Experts do not count, since so few steps do not reach all of them."""
    backbone.train()
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.device)
    with torch.enable_grad():
        (outputs(backbone, x) * weight).sum().backward()
    parameters = backbone.model.named_parameters()
    unused = {name for name, parameter in parameters if parameter.grad is None and "expert" not in name}
    backbone.zero_grad(set_to_none=True)
    return unused


def removable(
    backbone: HuggingFace, unused: set[str], x: Float[Tensor, "B L D"], y: Float[Tensor, "B L D"]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules of unused parameters only, and single unused parameters: those without which the model still gives y for
    x, and the parameters of the others."""
    candidates: list[str] = []
    for name, module in backbone.model.named_modules():
        own = {f"{name}.{key}" for key, _ in module.named_parameters()} if name else set()
        if own and own <= unused and not _inside(name, candidates):
            candidates.append(name)
    candidates += [name for name in sorted(unused) if not _inside(name, candidates)]

    def works_without(names: list[str]) -> bool:
        restore = remove(backbone.model, names)
        try:
            found = outputs(backbone, x)
            # On a GPU the same sum may be rounded otherwise.
            return torch.equal(found, y) if x.device.type == "cpu" else torch.allclose(found, y, rtol=1e-4, atol=1e-5)
        except Exception:  # models raise anything for want of a part
            return False
        finally:
            restore()

    if not works_without(candidates):
        candidates = [name for name in candidates if works_without([name])]
    return tuple(candidates), tuple(name for name in sorted(unused) if not _inside(name, candidates))


def _inside(name: str, modules: Iterable[str]) -> bool:
    """Is this the name of a module or parameter among, or inside, these?"""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)
