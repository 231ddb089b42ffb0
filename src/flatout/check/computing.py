"""Checks of the computing: precision, the switches of cuDNN and cuBLAS, compilation, layout, optimizer, batch size.

A setting that asks for something which then never happens is a failure: the person believes that it is on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from flatout.check import tree
from flatout.check.checklist import OK, WARN, Line, fail, ok, unknown, warn
from flatout.check.loading import UNTOLD, batch_size, training_loaders
from flatout.check.settings import folded
from flatout.check.study import Study
from flatout.check.values import Value
from flatout.model.setting_aliases import is_on

_AUTOCAST = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.amp.autocast_mode.autocast")
_CONVOLUTION = re.compile(r"(^|\.)(Conv[123]d|ConvTranspose[123]d|conv[123]d)$")
_MATRIX = re.compile(r"(^|\.)(Linear|LSTM|GRU|MultiheadAttention|Transformer\w*|scaled_dot_product_attention)$")
_OLD_CARDS = re.compile(r"V100|P100|P40|K80|T4|TITAN|GTX|RTX 20|Quadro [PRT]", re.IGNORECASE)
_NO_BF16 = "autocast with torch.float16 and a GradScaler (this card has no bf16)"
_BF16 = 'with torch.autocast("cuda", torch.bfloat16): around the forward pass and the loss'
_SAYS_ONLY = re.compile(r"^(print|logger|logging|log|wandb|tqdm|console|json|yaml|pprint|str|repr|format)\b")
_LOW = re.compile(r"autocast|(^|[._])amp([._]|$)|\.half$|\.bfloat16$")
# Where frameworks are asked for lower precision, and how each spells bf16.
_ASKED_OF_FRAMEWORKS: dict[str, dict[str, object]] = {
    "transformers.TrainingArguments": {"bf16": True, "fp16": True},
    "transformers.Seq2SeqTrainingArguments": {"bf16": True, "fp16": True},
    ".Trainer": {"precision": "bf16-mixed"},
    ".Fabric": {"precision": "bf16-mixed"},
    ".Accelerator": {"mixed_precision": "bf16"},
}


# ---------------------------------------------------------------- precision


def check_mixed_precision(study: Study) -> Line:
    """Autocast: there, switched on, and not switched off by a spelling."""
    if study.command is None:
        return _precision_of_config(study)
    found = _misspelled(study) or _autocast(study) or _of_a_framework(study) or _spoken_of(study)
    if found is not None:
        return found
    if not study.regions:
        return unknown("no training loop was seen")
    fix = _NO_BF16 if _old_card(study) else _BF16
    reason = "the model is trained in fp32: no autocast, no lower precision anywhere"
    return warn(reason, study.regions[0].where, fix=fix, code="compute.precision")


def _precisions(study: Study) -> list[tuple[str, Value]]:
    return study.settings.named("precision", "fp16", "trainer_precision")


def _asks(setting: Value) -> bool:
    """Whether a setting asks for the thing."""
    return setting.known and is_on(setting.what)


def _old_card(study: Study) -> bool:
    cards = study.machine.visible()
    return bool(cards) and all(_OLD_CARDS.search(card.name) for card in cards)


def _switched_on(study: Study, setting: Value) -> str:
    word: object = True if isinstance(setting.what, bool) else ("fp16" if _old_card(study) else "bf16")
    return setting.turned_to("amp" if setting.knob else "enabled", word)


def _precision_of_config(study: Study) -> Line:
    found = _precisions(study)
    on = next((value for _, value in found if _asks(value)), None)
    if on is not None:
        return ok(f"the config asks for {on.what}; give the script too, to see whether it is heard", on.where)
    if not found:
        return unknown("the config does not speak of it")
    name, value = found[0]
    reason = f"{name}: {str(value.what).lower()}: matrix work runs in fp32"
    return warn(reason, value.where, fix=_switched_on(study, value), code="compute.precision")


def _misspelled(study: Study) -> Line | None:
    """A setting that asks for mixed precision, compared with words that it is not: `amp: true` with 'bf16'."""
    for name, setting in _precisions(study):
        compared = list(_comparisons(study, name)) if _asks(setting) else []
        words = sorted({word for _, word in compared if isinstance(word, str) and is_on(word)})
        if any(not isinstance(word, str) or word == setting.what for _, word in compared):
            continue
        if isinstance(setting.what, str):  # another word altogether: the script may well know it elsewhere
            words = [word for word in words if word.lower() == setting.what.lower()]
        if not words or _heard(study, name, comparing=False):
            continue
        said = str(setting.what).lower() if isinstance(setting.what, bool) else repr(setting.what)
        where, word = compared[0]
        reason = (
            f"{name} is {said} ({setting.where}), but the script asks whether it is '{word}' ({where}): "
            "it stays off, and matrix work runs in fp32"
        )
        return fail(reason, setting.where, fix=setting.turned_to(name, words[0]), code="config.ignored")
    return None


def _autocast(study: Study) -> Line | None:
    """torch's own autocast, and whether it is switched on."""
    places = [
        (tree.where(call), study.argument(call, "enabled", 0 if "cuda" in name else None) or Value(True))
        for call, name in study.program.calls("autocast")
        if name in _AUTOCAST
    ]
    if not places:
        return None
    for where, enabled in places:
        if enabled.what is True:
            return ok("autocast is on", where)
        if isinstance(enabled.what, str):
            reason = f"autocast(enabled=…) takes true or false and raises a TypeError of {enabled.what!r} ({where})"
            return fail(reason, enabled.where or where, fix=enabled.turned_to("enabled", True), code="config.ignored")
    unclear = next((where for where, enabled in places if not enabled.known), None)
    if unclear is not None:
        return unknown("autocast is there; whether it is on is not told by the source alone", unclear)
    where, enabled = places[0]
    off = next((value for _, value in _precisions(study) if not _asks(value)), enabled)
    reason = f"autocast is there ({where}), but switched off: matrix work runs in fp32"
    return warn(reason, off.where or where, fix=_switched_on(study, off), code="compute.precision")


def _of_a_framework(study: Study) -> Line | None:
    """Lower precision that a framework is asked for."""
    for callee, names in _ASKED_OF_FRAMEWORKS.items():
        for call in study.called(callee):
            given = [value for name in names if (value := study.argument(call, name)) is not None]
            on = next((value for value in given if _asks(value)), None)
            if on is not None:
                return ok("on" if on.what is True else str(on.what), on.where)
            if given and all(value.known and value.what is not None for value in given):
                fix = given[0].turned_to(*next(iter(names.items())))
                return warn("fp32 is asked for", given[0].where, fix=fix, code="compute.precision")
    return None


def _spoken_of(study: Study) -> Line | None:
    """Lower precision that comes another way: a cast, a framework's default, a module that was not looked at."""
    kinds = ("torch.bfloat16", "torch.float16", "torch.half")
    for node in study.program.nodes():
        name = tree.dotted(node.func if isinstance(node, ast.Call) else node)
        if (isinstance(node, ast.Call) and _LOW.search(name)) or name in kinds:
            return unknown("lower precision is spoken of; what it is used for cannot be told", tree.where(node))
    framework = study.framework() or study.program.uses("apex")
    if framework:
        return unknown(f"{framework} may switch it on")
    return unknown(f"{study.program.missing[0]} was not looked at") if study.program.missing else None


# ---------------------------------------------------------------- settings, and who reads them


def _readings(study: Study, name: str) -> Iterator[ast.expr]:
    """Where the program reads a setting: cfg.name, cfg["name"], getattr(cfg, "name")."""
    for node in study.program.nodes():
        if isinstance(node, ast.Attribute) and folded(node.attr) == folded(name):
            yield node
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and folded(node.value) == folded(name):
            above = tree.parent(node)
            is_flag = isinstance(above, ast.Call) and ast.unparse(above.func).endswith("add_argument")
            if isinstance(above, ast.Subscript | ast.Call) and not is_flag:
                yield above


def _comparisons(study: Study, name: str) -> Iterator[tuple[str, object]]:
    """Where a setting is compared with == or in, and with what."""
    for node in _readings(study, name):
        match tree.parent(node):
            case ast.Compare(left=left, ops=[ast.Eq() | ast.In()], comparators=[right]) if left is node:
                what = study.value(right).what
                for word in (value.what for value in what) if isinstance(what, tuple) else (what,):
                    yield tree.where(node), word


def _heard(study: Study, name: str, *, comparing: bool = True) -> bool:
    """Whether a setting is read for more than saying it; `comparing` it with words counts, or does not."""
    return any(
        not _only_said(node) and (comparing or not isinstance(tree.parent(node), ast.Compare))
        for node in _readings(study, name)
    )


def _only_said(node: ast.AST) -> bool:
    """Whether a value is only printed or logged."""
    above = next((one for one in tree.around(node) if isinstance(one, ast.Call | ast.stmt)), None)
    return isinstance(above, ast.Call) and bool(_SAYS_ONLY.match(ast.unparse(above.func)))


def _ignored(study: Study, subject: str, why: str, fix: str) -> Line | None:
    """A switch that the settings ask for and nothing in the program throws."""
    for name, setting in study.settings.named(subject) if study.whole() else ():
        if setting.what is True and not _heard(study, name):
            reason = f"{name}: true ({setting.where}) has no effect: {why}"
            return fail(reason, setting.where, fix=fix, code="config.ignored")
    return None


# ---------------------------------------------------------------- switches


def check_tf32(study: Study) -> Line:
    """TF32 for matrix products, where they run in fp32."""
    fix = 'torch.set_float32_matmul_precision("high")'
    switches = ("torch.backends.cuda.matmul.allow_tf32", "torch.backends.cuda.matmul.fp32_precision")
    for target, value in study.assigned(*switches):
        if value.what in (True, "tf32"):
            return ok("on for matrix products", tree.where(target))
    for call in study.called("torch.set_float32_matmul_precision"):
        wanted = study.argument(call, "precision", 0)
        if wanted is not None and wanted.what != "highest":
            return ok("on for matrix products", tree.where(call))
    if ignored := _ignored(study, "tf32", "neither allow_tf32 nor set_float32_matmul_precision is ever set", fix):
        return ignored
    precision, matrix = check_mixed_precision(study).status, _layers(study, _MATRIX)
    if precision != WARN:
        does_better = precision == OK
        return unknown("mixed precision does better" if does_better else "in which precision it trains is not known")
    if _old_card(study):
        return unknown("this card has no TF32")
    if _layers(study, _CONVOLUTION):
        return unknown("convolutions use it as they are")
    if not matrix or study.framework():
        return unknown("what the model is made of is not seen here")
    return warn("matrix products run in full fp32", matrix[0], fix=fix, code="compute.precision")


def _layers(study: Study, pattern: re.Pattern[str]) -> list[str]:
    """Where layers of a kind are made."""
    return [tree.where(call) for call, name in study.program.calls() if pattern.search(name)]


def check_cudnn_benchmark(study: Study) -> Line:
    """cuDNN's search for the fastest convolution."""
    fix, convolutions = "torch.backends.cudnn.benchmark = True", _layers(study, _CONVOLUTION)
    set_to = list(study.assigned("torch.backends.cudnn.benchmark"))
    for target, value in set_to:
        if value.what is not False:
            return ok("on", tree.where(target))
    if ignored := _ignored(study, "cudnn_benchmark", "torch.backends.cudnn.benchmark is never set", fix):
        return ignored
    if any(value.what is True for _, value in study.assigned("torch.backends.cudnn.deterministic")):
        return unknown("off for the sake of reproducible runs")
    if not convolutions:
        return unknown("no convolutions seen")
    if not set_to:
        return unknown("not set; it pays where inputs keep one size", fix=f"try {fix}")
    reason = "switched off, and nothing here asks for deterministic convolutions"
    return warn(reason, tree.where(set_to[0][0]), fix=f"{fix}, if inputs keep one size", code="compute.layout")


def check_compile(study: Study) -> Line:
    """torch.compile: asked for, and called."""
    compiled, fix = study.compiled(), "model.compile() before the first step"
    if compiled is not None:
        return ok("torch.compile is called", compiled)
    ignored = _ignored(study, "compile", "torch.compile is never called", fix)
    return ignored or unknown("not asked for", fix=f"worth a trial: {fix}" if study.regions else None)


def check_fused_optimizer(study: Study) -> Line:
    """Adam and AdamW with fused=True."""
    adams = ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.adam.Adam", "torch.optim.adamw.AdamW")
    fused_at = None
    for call in study.called(*adams):
        name, where = tree.last_name(ast.unparse(call.func)), tree.where(call)
        fused, foreach = (study.argument(call, option) for option in ("fused", "foreach"))
        if fused is not None and fused.what is True:
            fused_at = where
            continue
        if _one_of_several(study, call):
            return unknown("which optimizer is built, is not told by the source alone", where)
        if fused is not None and not fused.known:
            return unknown(UNTOLD, where)
        slow = "a loop of small kernels" if foreach is not None and foreach.what is False else "several kernels a group"
        reason = f"{name} without fused=True: {slow} where one would do"
        return warn(reason, where, fix=f"{name}(…, fused=True)", code="compute.optimizer")
    return ok("fused", fused_at) if fused_at else unknown("no Adam or AdamW of torch's own is built here")


def _one_of_several(study: Study, call: ast.Call) -> bool:
    """Whether a condition decides between this optimizer and another."""
    here = tree.function_of(call) or tree.module_of(call).root
    optimizers = [other for other, name in study.program.calls() if re.match(r"torch\.optim\.(?!lr_scheduler)", name)]
    beside = [other for other in optimizers if (tree.function_of(other) or tree.module_of(other).root) is here]
    return len(beside) > 1 and not study.always(call, here)


def check_channels_last(study: Study) -> Line:
    """channels_last, where there are convolutions and tensor cores to use it."""
    names = ("torch.channels_last", "torch.channels_last_3d")
    place = next((tree.where(node) for node in study.program.nodes() if tree.dotted(node) in names), None)
    fix, setting = "model.to(memory_format=torch.channels_last), and inputs likewise", study.setting("channels_last")
    convolutions = _layers(study, re.compile(r"(^|\.)Conv2d$"))
    mostly = len(convolutions) > len(_layers(study, _MATRIX))
    if place is not None and setting.what is not False:
        return ok("used", place)
    if place is not None and mostly:
        reason = "the script can do it, but it is switched off: convolutions run in NCHW"
        return warn(reason, setting.where, fix=setting.turned_to("channels_last", True), code="compute.layout")
    if ignored := _ignored(study, "channels_last", "torch.channels_last is never used", fix):
        return ignored
    if not mostly:
        return unknown("no model that is mostly two-dimensional convolutions was seen")
    if check_mixed_precision(study).status != OK:
        return unknown("pays together with mixed precision")
    reason = "convolutions run in NCHW: tensor cores want channels last, and transpose every time"
    return warn(reason, convolutions[0], fix=fix, code="compute.layout")


def check_batch_size(study: Study) -> Line:
    """The batch size; whether it fills the card shows only in a run."""
    size = batch_size(study)
    loaders = [loader for loader in training_loaders(study) if loader.call and not loader.hugging_face]
    if size is None:
        return unknown(UNTOLD)
    if loaders and size.what == 1 and not any(loader.argument("batch_size", 1) for loader in loaders):
        fix = "batch_size=32, and the learning rate to go with it"
        reason = "no batch_size is given to the DataLoader: it is 1"
        return warn(reason, loaders[0].where(), fix=fix, code="memory.underused")
    fix = "flatout run --max-steps 50 says"
    return unknown(f"{size.what}; whether that fills the card shows only in a run", size.where, fix=fix)


def check_zero_grad(study: Study) -> Line:
    """zero_grad(set_to_none=False)."""
    calls = list(study.called(".zero_grad"))
    for call in calls:
        given = study.argument(call, "set_to_none", 0)
        if given is not None and given.what is False:
            reason = "set_to_none=False fills every gradient with zeros, and adds to them"
            return warn(reason, tree.where(call), fix="optimizer.zero_grad()", code="compute.optimizer")
    if not calls:
        return unknown("not called in what was looked at")
    return ok("gradients are set to None", tree.where(calls[0]))
