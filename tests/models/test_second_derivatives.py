# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients with `attn_implementation="eager"`: products with the Hessian, as influence functions and
sharpness need them."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from nystrom_models.models.masked_attention import attend
from tests.models.options import OPTIONS, language_model, relative_error

# The derivative of relu has a jump, on whose sides two precisions may lie.
SMOOTH = [option for option in OPTIONS if option != "linear-relu"]
# Four times the largest error: of central differences in float64, 6e-10, and of float32, 2.9e-6.
DIFFERENCES = 2.4e-9
TOLERANCE = 1.2e-5


def setting(option):
    model = language_model(option).double()
    model.set_attn_implementation("eager")
    ids, mask = torch.randint(3, 99, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[1, 25:] = 0
    direction = [0.1 * torch.randn_like(parameter) for parameter in model.parameters()]
    return model, {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100), direction


def gradients(model, inputs, labels, create_graph=False):
    # Not the model's own loss, which Transformers computes in float32 for causal models.
    loss = F.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())
    return torch.autograd.grad(loss, list(model.parameters()), create_graph=create_graph)


def hessian_product(model, inputs, labels, direction) -> Tensor:
    """The derivative of the gradient along a direction."""
    found = gradients(model, inputs, labels, create_graph=True)
    along = sum((gradient * part).sum() for gradient, part in zip(found, direction, strict=True))
    return as_vector(torch.autograd.grad(along, list(model.parameters())))


def as_vector(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("option", SMOOTH)
def test_products_with_the_hessian(option):
    model, inputs, labels, direction = setting(option)
    product = hessian_product(model, inputs, labels, direction)

    def gradient_after(step):
        with torch.no_grad():
            for parameter, part in zip(model.parameters(), direction, strict=True):
                parameter += step * part
        return as_vector(gradients(model, inputs, labels))

    step = 1e-6
    differences = (gradient_after(step) - gradient_after(-2 * step)) / (2 * step)
    assert relative_error(product, differences) < DIFFERENCES


@pytest.mark.parametrize("option", SMOOTH)
def test_in_float32(option):
    model, inputs, labels, direction = setting(option)
    exact = hessian_product(model, inputs, labels, direction)
    product = hessian_product(model.float(), inputs, labels, [part.float() for part in direction])
    assert relative_error(product.double(), exact) < TOLERANCE


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-layerwise", "linear-elu", "linear-causal"])
def test_derivatives_forwards(option):
    """`torch.func.jvp` along the embeddings is what the gradient says, while the weights ask for gradients."""
    model = language_model(option, **({} if option == "linear-elu" else {"conv_kernel_size": 5})).eval()
    model.set_attn_implementation("eager")
    embeddings = model.get_input_embeddings()(torch.randint(3, 99, (2, 20))).detach()
    along = torch.randn_like(embeddings)

    def total(embeddings):
        return model(inputs_embeds=embeddings).logits.square().sum()

    _, tangent = torch.func.jvp(total, (embeddings,), (along,))
    assert relative_error(tangent, (torch.func.grad(total)(embeddings) * along).sum()) < TOLERANCE
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(total(forward_ad.make_dual(embeddings, along))).tangent
    assert relative_error(tangent, (torch.func.grad(total)(embeddings) * along).sum()) < TOLERANCE


def test_derivatives_forwards_through_dropout():
    """PyTorch's attention with dropout has them, the one for a CPU that stores no weights has not."""
    query, key, value, along = torch.randn(4, 2, 2, 30, 8, dtype=torch.float64)

    def total(attention, query):
        torch.manual_seed(3)
        return attention(query, key, value, dropout_p=0.3).square().sum()

    _, tangent = torch.func.jvp(partial(total, attend), (query,), (along,))
    after, before = (total(F.scaled_dot_product_attention, query + step * along) for step in (1e-6, -1e-6))
    assert relative_error(tangent, (after - before) / 2e-6) < 1e-7
