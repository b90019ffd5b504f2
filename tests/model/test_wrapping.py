"""`mtb.wrap`: the same output from fewer tokens, for every family of encoders, against the model's own masked attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
import transformers
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import medtokenbudget as mtb
from medtokenbudget.backbone.encoders import partial_encoder, take
from medtokenbudget.errors import BudgetError, NonFiniteError, RequestError, ShapeError
from medtokenbudget.model.wrapping import Wrapped
from medtokenbudget.tokens import TokenBatch
from tests.backbone.test_partial import ROUTABLE, SHAPE
from tests.small_model import small_model

N, CLASSES = 16, 5
TOWER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 32}
TOWER |= {"patch_size": 8}


def vision(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**TOWER, num_labels=CLASSES, **options))


def two_towers(family: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 9}
        text |= {"bos_token_id": 0, "eos_token_id": 1}
        config = getattr(transformers, f"{family}Config")(vision_config=TOWER, text_config=text, num_labels=CLASSES)
        return getattr(transformers, f"{family}ForImageClassification")(config)

    return made


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: timm.create_model(name, num_classes=CLASSES, **SHAPE) for name in ROUTABLE},  # type: ignore[misc]
    "ViT, mean of patches": lambda: timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, global_pool="avg", **SHAPE),
    "ViT, mean and maximum": lambda: timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, global_pool="avgmax", **SHAPE),
    "ViTModel": vision("ViTModel", "ViTConfig"),
    "ViT classes": vision("ViTForImageClassification", "ViTConfig"),
    "Dinov2Model": vision("Dinov2Model", "Dinov2Config"),
    "DINOv2 classes": vision("Dinov2ForImageClassification", "Dinov2Config"),
    "Dinov2WithRegistersModel": vision("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
    "DINOv2 with registers, classes": vision("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig"),
    "DINOv3ViTModel": vision("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=4),
    "SiglipVisionModel": vision("SiglipVisionModel", "SiglipVisionConfig"),
    "SigLIP classes": two_towers("Siglip"),
    "CLIPVisionModel": vision("CLIPVisionModel", "CLIPVisionConfig"),
    "CLIP projection": vision("CLIPVisionModelWithProjection", "CLIPVisionConfig", projection_dim=7),
    "CLIP classes": two_towers("CLIP"),
}


def random_model(name: str) -> Any:
    """A tiny model of a family, all of whose parameters are random: a zero would hide a token that is lost."""
    torch.manual_seed(1)
    model = FAMILIES[name]().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def scores(images: Tensor) -> Tensor:
    """A router for tests: another order of the patches for each image."""
    return images.mean(1).unflatten(1, (4, 8)).unflatten(3, (4, 8)).mean((2, 4))


class Masked(TorchFunctionMode):
    """Masks dropped patches out of every attention among all tokens."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias, self.calls = bias, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and args[1].shape[-2] == self.bias.shape[-1] == args[0].shape[-2]:
            given = kwargs.get("attn_mask")
            kwargs["attn_mask"] = self.bias if given is None else given + self.bias
            self.calls += 1
        return func(*args, **kwargs)


@contextmanager
def masked(model: Any, indices: Tensor) -> Iterator[None]:
    """Inside the block, the dense model does not attend to patches that are not at `indices`, and reads out only these."""
    encoder = partial_encoder(model, "model")
    p = encoder.prefix
    seen = torch.cat([torch.ones(len(indices), p), torch.zeros(len(indices), N).scatter(1, indices, 1.0)], 1)
    mode = Masked(seen.log()[:, None, None])
    last = encoder.blocks[-1]
    hook = last.register_forward_hook(lambda _, __, x: torch.cat([x[:, :p], take(x[:, p:], indices)], 1))
    with mode:
        yield
    hook.remove()
    assert mode.calls == len(encoder.blocks)


def parts(output: Any) -> dict[str, Tensor]:
    """The tensors of an output, by name."""
    return {"": output} if isinstance(output, Tensor) else {name: part for name, part in output.items() if part is not None}


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert parts(found).keys() == parts(expected).keys()
    for name, part in parts(expected).items():
        torch.testing.assert_close(parts(found)[name], part, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("at", ["block:0", "block:2"])
def test_a_budget_of_one_gives_the_output_of_the_model(model: Any, images: Tensor, at: str) -> None:
    fast = mtb.wrap(model, scores, 1.0, at=at)
    found, expected = fast(images), model(images)
    assert fast.routing is not None
    assert bool(fast.routing.kept.all())
    if not isinstance(expected, Tensor) and "last_hidden_state" in expected:  # in the order of the kept patches
        p, whole = fast.encoder.prefix, expected["last_hidden_state"]
        expected["last_hidden_state"] = torch.cat([whole[:, :p], take(whole[:, p:], fast.routing.indices)], 1)
    same(found, expected)


@torch.no_grad()
def test_keeping_some_patches_is_the_model_that_does_not_attend_to_the_others(model: Any, images: Tensor) -> None:
    fast = mtb.wrap(model, scores, 0.4)
    found = fast(images)
    assert fast.routing is not None
    torch.testing.assert_close(fast.routing.scores, scores(images).flatten(1))
    assert fast.routing.kept.sum(1).tolist() == [6, 6, 6]
    with masked(model, fast.routing.indices):
        same(found, model(images))
    found, whole = parts(found), parts(model(images))
    assert not all(found[name].shape == part.shape and torch.allclose(found[name], part) for name, part in whole.items())


def gives_what_each_image_gives_alone(fast: Wrapped, images: Tensor, keep: Tensor) -> None:
    together = parts(fast(images, keep=keep))
    assert fast.routing is not None
    assert torch.equal(fast.routing.kept, keep)
    for number in range(3):
        alone = parts(fast(images[number : number + 1], keep=keep[number : number + 1].unflatten(1, (4, 4))))
        for name, part in alone.items():
            found = together[name][number : number + 1]
            found = found[:, : part.shape[1]] if name == "last_hidden_state" else found
            torch.testing.assert_close(found, part, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_masks_of_different_sizes_give_what_each_image_gives_alone(model: Any, images: Tensor) -> None:
    keep = scores(images).flatten(1).argsort(1) < torch.tensor([[3], [9], [6]])
    gives_what_each_image_gives_alone(mtb.wrap(model, None), images, keep)


INSIDE = ["vit_small_patch14_reg4_dinov2", "vit_small_patch16_dinov3", "beit_base_patch16_224", "DINOv3ViTModel"]


@torch.no_grad()
@pytest.mark.parametrize("name", INSIDE)
def test_inside_an_image_with_fewer_patches_gives_what_it_gives_alone(name: str, images: Tensor) -> None:
    keep = scores(images).flatten(1).argsort(1) < torch.tensor([[3], [16], [6]])
    gives_what_each_image_gives_alone(mtb.wrap(random_model(name), None, at="block:1"), images, keep)


def test_gradients_reach_every_parameter_that_the_model_trains(model: Any, images: Tensor) -> None:
    def trained(run: Callable[[Tensor], Any]) -> set[str]:
        model.zero_grad()
        sum(part.square().mean() for part in parts(run(images)).values()).backward()
        return {name for name, parameter in model.named_parameters() if parameter.grad is not None}

    fast = mtb.wrap(model.train(), scores, 0.4)
    assert trained(fast) == trained(model)


PLAIN = "vit_small_patch14_reg4_dinov2"


@pytest.fixture
def plain() -> VisionTransformer:
    return random_model(PLAIN)


def test_the_model_is_given_back_unchanged_and_a_checkpoint_of_it_fits(plain: VisionTransformer, images: Tensor) -> None:
    before = copy.deepcopy(plain.state_dict())
    fast = mtb.wrap(plain, "evit", 0.5, at="block:2")
    fast(images)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in plain.blocks)
    assert mtb.unwrap(fast) is plain
    torch.testing.assert_close(dict(plain.state_dict()), dict(before))
    assert {key.removeprefix("model.") for key in fast.state_dict()} == set(before)
    assert [id(parameter) for parameter in fast.parameters()] == [id(parameter) for parameter in plain.parameters()]
    with pytest.raises(RequestError, match="takes what `wrap` returned, got VisionTransformer"):
        mtb.unwrap(plain)
    with pytest.raises(RequestError, match="wrapped already"):
        mtb.wrap(fast)


@torch.no_grad()
@pytest.mark.parametrize(("router", "at"), [("center", "block:0"), ("evit", "block:2")])
def test_a_copy_runs_its_own_model(plain: VisionTransformer, images: Tensor, router: str, at: str) -> None:
    """As for a moving average of the weights."""
    fast = mtb.wrap(plain, router, 0.5, at=at)
    copied, before = copy.deepcopy(fast), fast(images)
    torch.testing.assert_close(copied(images), before)
    for parameter in copied.parameters():
        parameter.mul_(0.5)
    torch.testing.assert_close(fast(images), before)
    torch.testing.assert_close(copied(images), mtb.wrap(copied.model, router, 0.5, at=at)(images))
    assert not torch.allclose(copied(images), before)
    assert copied.to("cpu")._router() is fast._router()


@torch.no_grad()
def test_one_model_can_be_wrapped_more_than_once(plain: VisionTransformer, images: Tensor) -> None:
    expected = [mtb.wrap(copy.deepcopy(plain), "evit", 0.3, at=at)(images) for at in ("block:1", "block:3")]
    both = [mtb.wrap(plain, "evit", 0.3, at=at) for at in ("block:1", "block:3")]
    for fast, output in zip(both, expected):
        torch.testing.assert_close(fast(images), output)


def test_the_budget_can_be_changed(plain: VisionTransformer, images: Tensor) -> None:
    fast = mtb.wrap(plain, scores)
    for budget, k in ((0.3, 4), ("50%", 8), (0.01, 1)):
        fast.budget = budget
        fast(images)
        assert fast.routing is not None
        assert fast.routing.kept.sum(1).tolist() == [k] * 3
        assert torch.equal(fast.routing.indices, scores(images).flatten(1).topk(k, dim=1).indices)
    with pytest.raises(BudgetError, match=r"`budget` must be above 0 and at most 1, got 30\. Did you mean 0\.3"):
        fast.budget = 30


def test_wrapped_models_train_under_distributed_data_parallel(plain: VisionTransformer, images: Tensor, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        fast = mtb.wrap(plain.train(), scores, 0.4)
        fast(images).sum().backward()
        expected = plain.head.weight.grad.clone()
        plain.zero_grad()
        nn.parallel.DistributedDataParallel(fast)(images).sum().backward()
        torch.testing.assert_close(plain.head.weight.grad, expected)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "at"), [(PLAIN, "block:0"), *((name, "block:1") for name in INSIDE)])
def test_wrapped_models_compile_to_one_graph(name: str, at: str, images: Tensor) -> None:
    torch._dynamo.reset()  # otherwise every model counts as one more compilation of the same code
    fast = mtb.wrap(random_model(name), scores, 0.4, at=at)
    compiles(fast, images)


@pytest.mark.slow
def test_a_model_compiles_together_with_a_router_that_reads_its_attention(images: Tensor) -> None:
    torch._dynamo.reset()
    compiles(mtb.wrap(random_model(PLAIN), "evit", 0.4, at="block:2"), images)


def compiles(fast: Wrapped, images: Tensor) -> None:
    with torch.no_grad():
        expected = fast(images)
        compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
        fast.routing = None
        same(compiled(images), expected)
        assert fast.routing is not None
        fast.budget = 0.6
        same(compiled(images), fast(images))


@pytest.mark.slow
def test_a_model_compiles_together_with_the_shipped_router() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    fast = mtb.wrap(timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=2).eval(), "dermoscopy", 0.3)
    pictures = torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        expected = fast(pictures)
        torch.testing.assert_close(torch.compile(fast, fullgraph=True, backend="aot_eager")(pictures), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", [PLAIN, "vit_small_patch16_dinov3"])
def test_wrapped_models_export_to_onnx_with_any_batch_size(name: str, images: Tensor, tmp_path: Path) -> None:
    fast = mtb.wrap(random_model(name), scores, 0.4).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.onnx.export(fast, (images,), dynamo=True, dynamic_shapes={"images": {0: batch}}, verbose=False)
    program.save(str(tmp_path / "fast.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "fast.onnx"))
    with torch.no_grad():
        for few in (images, images[:1]):
            [found] = session.run(None, {session.get_inputs()[0].name: few.numpy()})
            np.testing.assert_allclose(found, fast(few).numpy(), rtol=1e-4, atol=1e-4)


# Routers -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> mtb.MedTokenBudget:
    return small_model(tmp_path_factory.mktemp("router"), ("center",), main="lats:lesion-first")


def test_a_router_sees_the_image_in_its_own_normalization_and_size(router: mtb.MedTokenBudget) -> None:
    pixels = torch.randint(0, 256, (2, 160, 160, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        tokens = router.encode(pixels)
        expected = router.classifier().selector.score(tokens)  # type: ignore[attr-defined]
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in ((0.7, 0.6, 0.5), (0.2, 0.3, 0.4)))
        colors = pixels.permute(0, 3, 1, 2) / 255
        model = timm.create_model("vit_tiny_patch16_224", img_size=160, depth=2, num_classes=0).eval()
        fast = mtb.wrap(model, router, 0.3, mean=(0.7, 0.6, 0.5), std=(0.2, 0.3, 0.4))
        fast((colors - mean) / std)
    assert fast.routing is not None
    torch.testing.assert_close(fast.routing.scores, expected, rtol=1e-4, atol=1e-5)
    assert fast.routing.grid == (10, 10)


def test_scores_of_another_grid_are_interpolated_to_that_of_the_model(router: mtb.MedTokenBudget) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=224, depth=2, num_classes=0).eval()
    fast = mtb.wrap(model, router, 0.3)
    fast(torch.rand(1, 3, 224, 224))
    assert fast.routing is not None
    assert fast.routing.grid == (14, 14)
    assert fast.routing.kept.sum() == 58


def test_a_retention_keeps_what_the_calibrated_threshold_keeps() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=256, depth=2, num_classes=0).eval()
    pictures = torch.rand(3, 3, 256, 256, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.2, 1.0, 3.0]).view(
        3, 1, 1, 1
    )
    fast = mtb.wrap(model, "dermoscopy", retention=0.95)
    fast(pictures)
    guarantee = mtb.load("dermoscopy", device="cpu").guarantee(0.95)
    assert fast.routing is not None
    assert fast.routing.kept.sum(1).tolist() == guarantee.counts(fast.routing.scores.numpy()).tolist()
    fast.budget = 0.25
    fast(pictures)
    assert (fast.retention, fast.routing.kept.sum(1).tolist()) == (None, [64] * 3)


def test_training_free_selectors_read_the_model_inside_and_the_image_before(plain: VisionTransformer, images: Tensor) -> None:
    fast = mtb.wrap(plain, "norm", 0.3, at="block:2")
    fast(images)
    x = plain._pos_embed(plain.patch_embed(images))
    for block in plain.blocks[:2]:
        x = block(x)
    assert fast.routing is not None
    tokens = TokenBatch(plain.norm(x)[:, plain.num_prefix_tokens :], (4, 4))
    torch.testing.assert_close(fast.routing.scores, mtb.create_selector("norm").score(tokens))  # type: ignore[attr-defined]
    before = mtb.wrap(plain, "center", 0.3)
    before(images)
    assert before.routing is not None
    assert before.routing.kept[0].unflatten(0, (4, 4))[1:3, 1:3].all()


class Custom(nn.Module):
    """A model of nobody's family."""

    def forward(self, images: Tensor) -> Tensor:
        return images


REFUSED = {
    "resnet18": "no.* fixed grid|not have one fixed grid",
    "convnext_atto": "not have one fixed grid",
    "swin_tiny_patch4_window7_224": "not have one fixed grid",
    "naflexvit_base_patch16_gap": "NaFlex pads them",
    "vit_relpos_small_patch16_224": "relates patches in a way of its own",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_work_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(RequestError, match=REFUSED[name]) as caught:
        mtb.wrap(timm.create_model(name), scores)
    assert "`route`" not in str(caught.value), "an option of another function"


def test_other_models_and_models_that_read_out_a_whole_grid_are_refused() -> None:
    with pytest.raises(RequestError, match="'Custom' does not have one fixed grid"):
        mtb.wrap(Custom(), scores)
    with pytest.raises(RequestError, match="ViTForMaskedImageModeling reads out a whole grid"):
        mtb.wrap(vision("ViTForMaskedImageModeling", "ViTConfig")(), scores)
    with pytest.raises(RequestError, match=r"drops patches at random itself"):
        mtb.wrap(timm.create_model("vit_tiny_patch16_224", patch_drop_rate=0.5, **SHAPE), scores)


def test_what_is_no_model_or_only_contains_one_is_refused() -> None:
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=2)
    cases: list[tuple[Any, str]] = [
        ("vit_tiny_patch16_224", r"takes a model, such as `timm.create_model\(...\)` returns, got str"),
        (torch.compile(vit), r"Wrap the model in this OptimizedModule \(`model._orig_mod`\)"),
        (nn.DataParallel(vit), r"Wrap the model in this DataParallel \(`model.module`\)"),
    ]
    for model, message in cases:
        with pytest.raises(RequestError, match=message):
            mtb.wrap(model, scores)


@torch.no_grad()
def test_a_model_of_other_channels_needs_a_router_that_reads_them(router: mtb.MedTokenBudget) -> None:
    gray = VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=2, in_chans=1).eval()
    assert mtb.wrap(gray, scores)(torch.rand(2, 1, 32, 32)).shape == (2, 1000)
    with pytest.raises(RequestError, match="reads RGB, but the model has 1 channels"):
        mtb.wrap(gray, router, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def test_a_model_of_unknown_normalization_is_asked_for_it_if_the_router_sees_images(router: mtb.MedTokenBudget) -> None:
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=2)
    with pytest.raises(RequestError, match=r"VisionTransformer does not say how its images are normalized.*Pass `mean` and `std`"):
        mtb.wrap(model, router)
    assert isinstance(mtb.wrap(model, router, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)), Wrapped)
    assert isinstance(mtb.wrap(model, scores), Wrapped)
    vit = vision("ViTForImageClassification", "ViTConfig")()
    with pytest.raises(RequestError, match="ViTForImageClassification does not say how its images are normalized"):
        mtb.wrap(vit, router)


def test_the_normalization_of_a_folder_of_transformers_is_read(router: mtb.MedTokenBudget, tmp_path: Path) -> None:
    vision("ViTForImageClassification", "ViTConfig")().save_pretrained(tmp_path)
    transformers.ViTImageProcessor(image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]).save_pretrained(tmp_path)
    fast = mtb.wrap(transformers.ViTForImageClassification.from_pretrained(tmp_path), router)
    wanted = fast.encoder.normalization()
    assert wanted is not None
    assert (wanted.mean, wanted.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


BAD = [
    ({"budget": 0.3, "retention": 0.9}, "both say how much is kept"),
    ({"retention": 0.9}, "`retention` needs a router that was calibrated"),
    ({"at": "block:5"}, r"`at` must be block:0 \(before the blocks\) to block:4, got 'block:5'"),
    ({"at": "middle"}, "`at` must be"),
    ({"mean": (0.5, 0.5, 0.5)}, "`mean` and `std` belong together"),
    *(
        ({"mean": mean, "std": std}, r"Check `mean` and `std`: three numbers each, for images in \[0, 1\]")
        for mean, std in [
            ((0.5, 0.5, 0.5), (0.5, 0.0, 0.5)),
            (0.5, 0.5),
            ("abc", "abc"),
            ((123.7, 116.3, 103.5), (58.4, 57.1, 57.4)),
        ]
    ),
    ({"router": 3}, "`router` must be a name, a model, a function, or None .*got int"),
    ({"router": torch.ones(3, N, dtype=torch.bool)}, "None with `keep` in each call, got Tensor"),
    ({"router": "centre"}, "Unknown router 'centre' .*Did you mean 'center'"),
    ({"router": "lats"}, "'lats' learns"),
    ({"router": "random"}, "is random"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_a_request_that_cannot_be_followed_says_why(plain: VisionTransformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        mtb.wrap(plain, **({"router": scores} | options))


def test_images_masks_and_scores_of_another_shape_are_refused(plain: VisionTransformer, images: Tensor) -> None:
    fast = mtb.wrap(plain, scores)
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: fast(images[0]), ShapeError, r"Images must be float \[B, 3, H, W\]"),
        (lambda: fast((255 * images).byte()), ShapeError, "Images must be float"),
        (lambda: fast(images[:, :1]), ShapeError, r"float \[B, 3, H, W\].*got torch.float32 \[3, 1, 32, 32\]"),
        (lambda: fast(images[:0]), ShapeError, r"got torch.float32 \[0, 3, 32, 32\]"),
        (lambda: fast(images[..., :24]), ShapeError, "It takes images of 32 x 32 pixels, not of 32 x 24"),
        (lambda: fast(images, keep=torch.ones(3, N)), ShapeError, r"`keep` must be bool \[3, 16\] or \[3, 4, 4\], got float32"),
        (lambda: fast(images, keep=torch.zeros(3, N, dtype=torch.bool)), RequestError, "keeps no patch of image 0"),
        (lambda: fast(images, labels=1), RequestError, "takes images alone, not labels"),
        (lambda: mtb.wrap(plain, None)(images), RequestError, "wrapped without a router. Pass `keep`"),
        (
            lambda: mtb.wrap(plain, lambda i: i)(images),
            ShapeError,
            r"must return scores \[B, N\] or \[B, h, w\], got \[3, 3, 32, 32\]",
        ),
        (lambda: mtb.wrap(plain, lambda i: i[:, 0, 0])(images), ShapeError, r"returned scores \[3, 32\] for 3 images of 4 x 4"),
        (lambda: mtb.wrap(plain, lambda i: i[:, 0] / 0 * 0)(images), NonFiniteError, "NaN or infinite"),
        (lambda: mtb.wrap(plain, "norm", at="block:2")(images * torch.nan), NonFiniteError, "NaN or infinite"),
        (lambda: mtb.wrap(plain, "center")(255 * images.abs()), RequestError, "not normalized as the model expects them"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
    vit = mtb.wrap(random_model("ViT classes"), scores)
    with pytest.raises(RequestError, match="has no output_hidden_states"):
        vit(images, output_hidden_states=True)


def test_models_of_transformers_take_their_own_arguments(images: Tensor) -> None:
    model = random_model("ViT classes")
    fast = mtb.wrap(model, scores, 1.0)
    labels = torch.tensor([0, 1, 2])
    same(fast(pixel_values=images, labels=labels), model(pixel_values=images, labels=labels))
    assert isinstance(fast(images, return_dict=False), tuple)
