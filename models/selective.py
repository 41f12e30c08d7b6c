"""What Mamba and Mamba-2 share: options, and the start of their short convolution, which xLSTM shares."""

from pydantic import Field, model_validator
from torch import nn

from spt.models.gated import ShortConvolution
from spt.models.options import BackboneConfig, NormKind


class SelectiveConfig(BackboneConfig):
    norm: NormKind = Field("rms", description="normalisation: rms (as in the paper), layer, batch, scalar, scale, none")
    expansion: int = Field(2, ge=1, description="features E, as a multiple of d_model")
    convolution: int = Field(4, ge=1, description="length of the short convolution, in steps")
    dt_min: float = Field(1e-3, gt=0, description="smallest initial step size; drawn log-uniformly")
    dt_max: float = Field(0.1, gt=0, description="largest initial step size")

    @model_validator(mode="after")
    def _step_sizes_fit(self) -> "SelectiveConfig":
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min {self.dt_min} is larger than dt_max {self.dt_max}")
        return self


def short_convolution(features: int, width: int) -> ShortConvolution:
    """Initialised like torch's convolutions: weight and bias from U(-1/sqrt(W), 1/sqrt(W))."""
    layer = ShortConvolution(features, width, std=0.0)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)
    return layer
