"""Checks of the computing: precision, the switches of cuDNN and cuBLAS, compilation, layout, optimizer, batch size.

A setting that asks for something which then never happens is a failure: the person believes that it is on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from flatout.diagnose.preflight.checklist import OK, WARN, Line, fail, ok, unknown, warn
from flatout.diagnose.preflight.loading import batch_size, training_loaders
from flatout.diagnose.preflight.source import Module
from flatout.diagnose.preflight.study import Study
from flatout.diagnose.preflight.training import every_time
from flatout.diagnose.preflight.values import Value, folded

_AUTOCAST = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.amp.autocast_mode.autocast")
_OFF_WORDS = ("off", "no", "none", "false", "fp32", "float32", "32", "32-true", "")
_LAYERS_CONV = re.compile(r"(^|\.)(Conv[123]d|ConvTranspose[123]d|conv[123]d)$")
_LAYERS_MATRIX = re.compile(r"(^|\.)(Linear|LSTM|GRU|MultiheadAttention|Transformer\w*|scaled_dot_product_attention)$")
_OLD_CARDS = re.compile(r"V100|P100|P40|K80|T4|TITAN|GTX|RTX 20|Quadro [PRT]", re.IGNORECASE)
_NO_BF16 = "autocast with torch.float16 and a GradScaler (this card has no bf16)"
_BF16 = 'with torch.autocast("cuda", torch.bfloat16): around the forward pass and the loss'
_SAYS_ONLY = re.compile(r"^(print|logger|logging|log|wandb|tqdm|console|json|yaml|pprint|str|repr|format)\b")


def check_mixed_precision(study: Study) -> Line:
    """Autocast: there, switched on, and not switched off by a spelling."""
    subject = "mixed precision"
    if study.program is None:
        return _precision_of_config(study)
    misspelled = _misspelled(study)
    if misspelled is not None:
        return misspelled
    casts = list(study.called(*_AUTOCAST))
    states = [
        (m, c, study.argument(m, c, "enabled", 0 if "cuda" in (m.dotted(c.func) or "") else None)) for m, c in casts
    ]
    if casts and all(enabled is not None and enabled.what is False for _, _, enabled in states):
        module, call, enabled = states[0]
        assert enabled is not None
        setting = study.setting("amp")
        off = setting if setting.known and not _asks(setting) else enabled
        return warn(
            subject,
            f"autocast is there ({module.where(call)}), but switched off: matrix work runs in fp32",
            fix=_switch_on(off, _old_card(study)),
            code="compute.precision",
            where=off.where or module.where(call),
        )
    if casts:
        module, call, enabled = next(s for s in states if s[2] is None or s[2].what is not False)
        if enabled is None or enabled.what is True:
            return ok(subject, "autocast is on", module.where(call))
        return unknown(
            subject, "autocast is there; whether it is on is not told by the source alone", where=module.where(call)
        )
    elsewhere = _other_precision(study)
    if elsewhere is not None:
        return elsewhere
    if not study.regions:
        return unknown(subject, "no training loop was seen")
    module, node = study.regions[0].module, study.regions[0].node
    return warn(
        subject,
        "the model is trained in fp32: no autocast, no lower precision anywhere",
        fix=_NO_BF16 if _old_card(study) else _BF16,
        code="compute.precision",
        where=module.where(node),
    )


def _asks(setting: Value) -> bool:
    """Whether a setting asks for the thing."""
    return setting.known and bool(setting.what) and str(setting.what).lower() not in _OFF_WORDS


def _old_card(study: Study) -> bool:
    cards = study.machine.visible()
    return bool(cards) and all(_OLD_CARDS.search(card.name) for card in cards)


def _switch_on(setting: Value, old: bool) -> str:
    word: object = True if isinstance(setting.what, bool) else ("fp16" if old else "bf16")
    return setting.turned_to("amp" if setting.knob else "enabled", word)


def _precision_of_config(study: Study) -> Line:
    found = study.settings("amp")
    on = next((value for _, value in found if _asks(value)), None)
    if on is not None:
        return ok(
            "mixed precision",
            f"the config asks for {on.what}; give the script too, to see whether it is heard",
            on.where,
        )
    if found:
        name, value = found[0]
        return warn(
            "mixed precision",
            f"{name}: {str(value.what).lower()}: matrix work runs in fp32",
            fix=_switch_on(value, _old_card(study)),
            code="compute.precision",
            where=value.where,
        )
    return unknown("mixed precision", "the config does not speak of it")


def _misspelled(study: Study) -> Line | None:
    """A setting that asks for mixed precision, compared with words that it is not: `amp: true` with 'bf16'."""
    for name, setting in study.settings("amp"):
        if not _asks(setting):
            continue
        compared = list(_comparisons(study, name))
        words = {word for _, _, word in compared if isinstance(word, str)}
        if not compared or setting.what in words or len(words) < len({repr(word) for _, _, word in compared}):
            continue
        if isinstance(setting.what, str) and setting.what.lower() in {word.lower() for word in words}:
            hint = next(word for word in words if word.lower() == setting.what.lower())
        elif isinstance(setting.what, bool):
            hint = sorted(words - set(_OFF_WORDS))[0] if words - set(_OFF_WORDS) else ""
        else:
            continue  # another word for another kind of precision: the script may well know it elsewhere
        if not hint or _used_otherwise(study, name):
            continue
        module, node, word = compared[0]
        return fail(
            "mixed precision",
            f"{name} is {_said(setting.what)} ({setting.where}), but the script asks whether it is '{word}' "
            f"({module.where(node)}): it stays off, and matrix work runs in fp32",
            fix=setting.turned_to(name, hint),
            code="config.ignored",
            where=setting.where,
        )
    return None


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _comparisons(study: Study, name: str) -> Iterator[tuple[Module, cst.Comparison, object]]:
    """Where a setting is compared with == or in, and with what."""
    for module, node in _readings(study, name):
        above = module.parent(node)
        if isinstance(above, cst.Comparison) and above.left is node and len(above.comparisons) == 1:
            target = above.comparisons[0]
            value = study.value(module, target.comparator).what
            if isinstance(target.operator, cst.Equal):
                yield module, above, value
            elif isinstance(target.operator, cst.In) and isinstance(value, tuple):
                for item in value:
                    yield module, above, item.what


def _readings(study: Study, name: str) -> Iterator[tuple[Module, cst.BaseExpression]]:
    """Where the program reads a setting: cfg.name, cfg["name"], getattr(cfg, "name")."""
    for module in study.program.modules if study.program is not None else ():
        for node in module.nodes:
            if isinstance(node, cst.Attribute) and folded(node.attr.value) == folded(name):
                yield module, node
            elif isinstance(node, cst.SimpleString) and folded(str(node.evaluated_value)) == folded(name):
                around = next(iter(module.around(node)), None)
                if isinstance(around, cst.Arg):
                    call = module.parent(around)
                    is_flag = isinstance(call, cst.Call) and module.text(call.func).endswith("add_argument")
                    if isinstance(call, cst.Call) and not is_flag:
                        yield module, call
                elif isinstance(around, cst.Index):
                    yield module, next(n for n in module.around(node) if isinstance(n, cst.Subscript))


def _used_otherwise(study: Study, name: str) -> bool:
    """Whether a setting is read for more than comparing it with words, or saying it."""
    for module, node in _readings(study, name):
        if not isinstance(module.parent(node), cst.Comparison) and not _only_said(module, node):
            return True
    return False


def _only_said(module: Module, node: cst.CSTNode) -> bool:
    """Whether a value is only printed or logged."""
    for above in module.around(node):
        if isinstance(above, cst.Call):
            return bool(_SAYS_ONLY.match(module.text(above.func)))
        if isinstance(above, cst.BaseStatement | cst.BaseSmallStatement):
            return False
    return False


# Where frameworks are asked for lower precision, and how each spells bf16.
_ASKED_OF_FRAMEWORKS: dict[str, dict[str, object]] = {
    "transformers.TrainingArguments": {"bf16": True, "fp16": True},
    "transformers.Seq2SeqTrainingArguments": {"bf16": True, "fp16": True},
    ".Trainer": {"precision": "bf16-mixed"},
    ".Fabric": {"precision": "bf16-mixed"},
    ".Accelerator": {"mixed_precision": "bf16"},
}


def _other_precision(study: Study) -> Line | None:
    """Lower precision that comes another way: a framework's argument, a cast of the model."""
    subject = "mixed precision"
    for callee, names in _ASKED_OF_FRAMEWORKS.items():
        for module, call in study.called(callee):
            given = [value for name in names if (value := study.argument(module, call, name)) is not None]
            on = next((value for value in given if _asks(value)), None)
            if on is not None:
                return ok(subject, f"{on.what}" if on.what is not True else "on", on.where)
            if given and all(value.known and value.what is not None for value in given):
                name, word = next(iter(names.items()))
                return warn(
                    subject,
                    "fp32 is asked for",
                    fix=given[0].turned_to(name, word),
                    code="compute.precision",
                    where=given[0].where,
                )
    for module, call, name in study.calls():
        if re.search(r"autocast|(^|[._])amp([._]|$)|\.half$|\.bfloat16$", name):
            return unknown(
                subject, "lower precision is spoken of; what it is used for cannot be told", where=module.where(call)
            )
    for module in study.program.modules if study.program is not None else ():
        for node in module.nodes:
            if isinstance(node, cst.Attribute) and module.dotted(node) in (
                "torch.bfloat16",
                "torch.float16",
                "torch.half",
            ):
                return unknown(
                    subject,
                    "lower precision is spoken of; what it is used for cannot be told",
                    where=module.where(node),
                )
    framework = study.framework() or (study.program.uses("apex") if study.program else None)
    if framework:
        return unknown(subject, f"{framework} may switch it on")
    if study.program is not None and study.program.missing:
        return unknown(subject, f"{study.program.missing[0]} was not looked at")
    return None


# ---------------------------------------------------------------- switches


def check_tf32(study: Study) -> Line:
    """TF32 for matrix products, where they run in fp32."""
    subject = "TF32"
    for module, target, value in study.assigned(
        "torch.backends.cuda.matmul.allow_tf32", "torch.backends.cuda.matmul.fp32_precision"
    ):
        if value.what in (True, "tf32"):
            return ok(subject, "on for matrix products", module.where(target))
    for module, call in study.called("torch.set_float32_matmul_precision"):
        wanted = study.argument(module, call, "precision", 0)
        if wanted is not None and wanted.what != "highest":
            return ok(subject, "on for matrix products", module.where(call))
    ignored = _ignored(study, "tf32", subject, "neither allow_tf32 nor set_float32_matmul_precision is ever set",
                       'torch.set_float32_matmul_precision("high")')  # fmt: skip
    if ignored is not None:
        return ignored
    precision = check_mixed_precision(study).status
    if precision == OK:
        return unknown(subject, "mixed precision does better")
    if precision != WARN:
        return unknown(subject, "in which precision the model is trained, is not known")
    if _old_card(study):
        return unknown(subject, "this card has no TF32")
    conv, matrix = _layer(study, _LAYERS_CONV), _layer(study, _LAYERS_MATRIX)
    if conv is not None:
        return unknown(subject, "convolutions use it as they are")
    if matrix is None or study.framework():
        return unknown(subject, "what the model is made of is not seen here")
    return warn(
        subject,
        "matrix products run in full fp32",
        fix='torch.set_float32_matmul_precision("high")',
        code="compute.precision",
        where=matrix,
    )


def _layer(study: Study, pattern: re.Pattern[str]) -> str | None:
    """Where a layer of that kind is made."""
    return next((module.where(call) for module, call, name in study.calls() if pattern.search(name)), None)


def _ignored(study: Study, subject: str, title: str, why: str, fix: str) -> Line | None:
    """A switch that the settings ask for and nothing in the program throws."""
    if study.program is None or not study.regions or study.program.missing or study.framework():
        return None
    for name, setting in study.settings(subject):
        if setting.what is True and not _heard(study, name):
            return fail(
                title,
                f"{name}: true ({setting.where}) has no effect: {why}",
                fix=fix,
                code="config.ignored",
                where=setting.where,
            )
    return None


def _heard(study: Study, name: str) -> bool:
    """Whether anything but a message reads a setting."""
    return any(not _only_said(module, node) for module, node in _readings(study, name))


def check_cudnn_benchmark(study: Study) -> Line:
    """cuDNN's search for the fastest convolution."""
    subject = "cuDNN benchmark"
    set_to = list(study.assigned("torch.backends.cudnn.benchmark"))
    on = next(((m, t) for m, t, v in set_to if v.what is not False), None)
    if on is not None:
        return ok(subject, "on", on[0].where(on[1]))
    ignored = _ignored(study, "cudnn_benchmark", subject, "torch.backends.cudnn.benchmark is never set",
                       "torch.backends.cudnn.benchmark = True")  # fmt: skip
    if ignored is not None:
        return ignored
    if any(v.what is True for _, _, v in study.assigned("torch.backends.cudnn.deterministic")):
        return unknown(subject, "off for the sake of reproducible runs")
    if set_to and _layer(study, _LAYERS_CONV):
        module, target, _ = set_to[0]
        return warn(
            subject,
            "switched off, and nothing here asks for deterministic convolutions",
            fix="torch.backends.cudnn.benchmark = True, if inputs keep one size",
            code="compute.layout",
            where=module.where(target),
        )
    if _layer(study, _LAYERS_CONV):
        return unknown(
            subject, "not set; it pays where inputs keep one size", fix="try torch.backends.cudnn.benchmark = True"
        )
    return unknown(subject, "no convolutions seen")


def check_compile(study: Study) -> Line:
    """torch.compile: asked for, and called."""
    compiled = study.compiled()
    if compiled is not None:
        return ok("compile", "torch.compile is called", compiled)
    ignored = _ignored(
        study, "compile", "compile", "torch.compile is never called", "model.compile() before the first step"
    )
    if ignored is not None:
        return ignored
    return unknown(
        "compile",
        "not asked for",
        fix="worth a trial: model.compile() before the first step" if study.regions else None,
    )


def check_fused_optimizer(study: Study) -> Line:
    """Adam and AdamW with fused=True."""
    subject = "fused optimizer"
    adams = ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.adam.Adam", "torch.optim.adamw.AdamW")
    for module, call in study.called(*adams):
        if _one_of_several(study, module, call):
            return unknown(
                subject, "which optimizer is built, is not told by the source alone", where=module.where(call)
            )
        given = [study.argument(module, call, name) for name in ("fused", "foreach")]
        fused, foreach = given
        name = (module.dotted(call.func) or "").rsplit(".", 1)[-1]
        if fused is not None and fused.what is True:
            continue
        if fused is not None and not fused.known:
            return unknown(subject, "not told by the source alone", where=module.where(call))
        slow = "a loop of small kernels" if foreach is not None and foreach.what is False else "several kernels a group"
        return warn(
            subject,
            f"{name} without fused=True: {slow} where one would do",
            fix=f"{name}(…, fused=True)",
            code="compute.optimizer",
            where=module.where(call),
        )
    used = next(study.called(*adams), None)
    if used is not None:
        return ok(subject, "fused", used[0].where(used[1]))
    return unknown(subject, "no Adam or AdamW of torch's own is built here")


def _one_of_several(study: Study, module: Module, call: cst.Call) -> bool:
    """Whether a condition decides between this optimizer and another."""
    function = module.function_of(call) or module.tree
    others = [c for m, c, name in study.calls() if m is module and name.startswith("torch.optim.") and c is not call
              and ".lr_scheduler." not in name and (module.function_of(c) or module.tree) is function]  # fmt: skip
    return bool(others) and study.evaluator is not None and not every_time(study.evaluator, module, call, function)


def check_channels_last(study: Study) -> Line:
    """channels_last, where there are convolutions and tensor cores to use it."""
    subject = "channels_last"
    places = [
        (module, node)
        for module in (study.program.modules if study.program is not None else ())
        for node in module.nodes
        if isinstance(node, cst.Attribute) and module.dotted(node) in ("torch.channels_last", "torch.channels_last_3d")
    ]
    setting = study.setting("channels_last")
    convs = [m.where(c) for m, c, name in study.calls() if re.search(r"(^|\.)Conv2d$", name)]
    made_of_them = len(convs) > sum(1 for _, _, name in study.calls() if _LAYERS_MATRIX.search(name))
    if places:
        module, node = places[0]
        if setting.what is False and not made_of_them:
            return unknown(subject, "switched off; what the model is made of is not seen here", where=setting.where)
        if setting.what is False:
            return warn(
                subject,
                "the script can do it, but it is switched off: convolutions run in NCHW",
                fix=setting.turned_to(subject, True),
                code="compute.layout",
                where=setting.where,
            )
        return ok(subject, "used", module.where(node))
    ignored = _ignored(study, "channels_last", subject, "torch.channels_last is never used",
                       "model.to(memory_format=torch.channels_last), and the inputs likewise")  # fmt: skip
    if ignored is not None:
        return ignored
    if not made_of_them:
        return unknown(subject, "no model that is mostly two-dimensional convolutions was seen")
    if check_mixed_precision(study).status != OK:
        return unknown(subject, "pays together with mixed precision")
    return warn(
        subject,
        "convolutions run in NCHW: tensor cores want channels last, and transpose every time",
        fix="model.to(memory_format=torch.channels_last), and the inputs likewise",
        code="compute.layout",
        where=convs[0],
    )


def check_batch_size(study: Study) -> Line:
    """The batch size; whether it fills the card shows only in a run."""
    subject, size = "batch size", batch_size(study)
    if size is None or not size.is_number():
        return unknown(subject, "not told by the source alone")
    loaders = [loader for loader in training_loaders(study) if not loader.hugging_face]
    forgotten = loaders and all(
        loader.get("batch_size").what == 1 and not loader.given("batch_size") for loader in loaders
    )
    if forgotten and not any(loader.given("batch_sampler") for loader in loaders):
        return warn(
            subject,
            "no batch_size is given to the DataLoader: it is 1",
            fix="batch_size=32, and the learning rate to go with it",
            code="memory.underused",
            where=loaders[0].where,
        )
    return unknown(
        subject,
        f"{size.what}; whether that fills the card shows only in a run",
        fix="flatout run --max-steps 50 says",
        where=size.where,
    )


def check_zero_grad(study: Study) -> Line:
    """zero_grad(set_to_none=False)."""
    subject = "zero_grad"
    calls = list(study.called(".zero_grad"))
    for module, call in calls:
        given = study.argument(module, call, "set_to_none", 0)
        if given is not None and given.what is False:
            return warn(
                subject,
                "set_to_none=False fills every gradient with zeros, and adds to them",
                fix="optimizer.zero_grad()",
                code="compute.optimizer",
                where=module.where(call),
            )
    if calls:
        return ok(subject, "gradients are set to None", calls[0][0].where(calls[0][1]))
    return unknown(subject, "not called in what was looked at")
