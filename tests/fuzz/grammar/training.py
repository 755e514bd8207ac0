"""What is done with the model: training steps, and what users do to a module beside them."""

from __future__ import annotations

from .writer import Writer

ORDINARY = (
    """\
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
for _ in range(2):
    run.total(run.step()).backward()
run.gradients()
""",
    """\
out = run.step()
run.total(out).backward()
norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
run.look('norm', norm)
run.gradients()
""",
    """\
a = run.step()
b = run.step()
run.total(a).backward()
run.total(b).backward()
run.gradients()
""",
    """\
a = run.step()
b = run.step()
run.total(b).backward()
run.gradients()
run.total(a).backward()
run.gradients()
""",
    """\
a = run.step()
b = run.step()
(run.total(a) + 2 * run.total(b)).backward()
run.gradients()
""",
    """\
out = run.step()
loss = run.total(out)
loss.backward(retain_graph=True)
loss.backward()
run.gradients()
""",
    """\
out = run.step()
run.total(out, 0).backward(retain_graph=True)
run.gradients()
run.total(out, 1).backward()
run.gradients()
""",
    """\
out = run.step()
run.total(out, 0).backward()
run.gradients()
""",
    """\
out = run.step()
run.total(out, 1).backward()
run.gradients()
""",
    """\
with torch.no_grad():
    run.step()
""",
    """\
with torch.inference_mode():
    run.step()
""",
    """\
run.backward()
run.gradients()
""",
    """\
run.backward()
run.backward()
run.gradients()
""",
    """\
run.backward(retain_graph=True)
run.gradients()
""",
    """\
out = run.step()
run.total(out).backward(gradient=torch.tensor(-0.5, dtype=torch.float64))
run.gradients()
""",
    """\
out = run.step()
trained = [p for p in run.model.parameters() if p.requires_grad]
run.look('grad', torch.autograd.grad(run.total(out), trained, allow_unused=True))
""",
)

OPTIMIZED = """\
optimizer = run.optimizer('{kind}')
for _ in range({times}):
    run.total(run.step()).backward()
    optimizer.step()
    optimizer.zero_grad({zero})
    run.gradients()
run.state()
"""

UNUSUAL = (
    """\
args, kwargs = run.batch()
args, kwargs = [run.retyped(a) for a in args], {k: run.retyped(v) for k, v in kwargs.items()}
out = run.call(*args, **kwargs)
run.total(out).backward()
run.gradients()
""",
    """\
run.model = Around(run.model, directly)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
run.model = Around(run.model, checkpointed)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
run.model = Around(run.model, with_other_parameters)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
run.model = Around(run.model, with_saved_tensors_moved)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
out = run.step()
some = [p for p in run.model.parameters() if p.requires_grad][:1]
run.total(out).backward(inputs=some)
run.gradients()
""",
    """\
out = run.step()
leaf = run.leaf(out)
if leaf.requires_grad:
    leaf.retain_grad()
run.total(out).backward()
run.look('kept', leaf.grad)
run.gradients()
""",
    """\
out = run.step()
leaf = run.leaf(out)
if leaf.requires_grad:
    leaf.register_hook(lambda g: g * 2)
run.total(out).backward()
run.gradients()
""",
    """\
args, kwargs = run.batch()
args = [a.tolist() if isinstance(a, torch.Tensor) and a.dim() == 0 else a for a in args]
out = run.call(*args, **kwargs)
run.total(out).backward()
run.gradients()
""",
    """\
args, kwargs = run.batch()
args = [a.expand(2, *a.shape)[0] if isinstance(a, torch.Tensor) else a for a in args]
args = [a.mT.contiguous().mT if isinstance(a, torch.Tensor) and a.dim() > 1 else a for a in args]
out = run.call(*args, **kwargs)
run.total(out).backward()
run.gradients()
""",
    """\
args, kwargs = run.batch()
out = run.call(*args, **kwargs)
again = run.call(*args, **kwargs)
(run.total(out) - run.total(again)).backward()
run.gradients()
""",
    """\
out = run.step()
run.total(run.whole(torch.utils._pytree.tree_map(lambda t: t.detach() if torch.is_tensor(t) else t, out)))
run.look('leaves', [t.is_leaf for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t)])
""",
    """\
run.leaf(run.step()).square().sum().backward()
run.gradients()
""",
    """\
for p in run.model.parameters():
    p.grad = torch.ones_like(p) if p.requires_grad else None
run.total(run.step()).backward()
run.gradients()
""",
    """\
run.total(run.step()).backward()
for p in list(run.model.parameters())[1:]:
    p.grad = None
run.total(run.step()).backward()
run.gradients()
""",
    """\
seen = []
for p in run.model.parameters():
    if p.requires_grad:
        p.register_post_accumulate_grad_hook(lambda p: seen.append(1))
run.total(run.step()).backward()
run.look('seen', len(seen))
run.gradients()
""",
    """\
run.model.register_full_backward_hook(lambda module, given, taken: None)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
with torch.no_grad():
    for s in run.model.buffers():
        s.fill_(1)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
for p in run.model.parameters():
    p.data.mul_(0.5)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
run.model.requires_grad_(False)
out = run.step()
run.look('wants', run.total(out).requires_grad)
""",
    """\
for name, p in list(run.model.named_parameters(recurse=False))[:1]:
    setattr(run.model, name, nn.Parameter(p.detach().clone() * 2))
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
run.model.eval()
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
run.model.eval()
run.model.train()
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
out = run.step()
loss = run.total(out)
loss.backward()
loss.backward()
run.gradients()
""",
    """\
out = run.step()
leaf = run.leaf(out)
leaf.mul_(2)
run.look('changed', run.repeated(out))
run.total(out).backward()
run.gradients()
""",
    """\
out = run.step()
with torch.no_grad():
    run.leaf(out).mul_(2)
run.look('changed', run.repeated(out))
run.total(out).backward()
run.gradients()
""",
    """\
out = run.step()
run.leaf(out).detach().mul_(2)
run.total(out).backward()
run.gradients()
""",
    """\
out = run.step()
trained = [p for p in run.model.parameters() if p.requires_grad]
grads = torch.autograd.grad(run.total(out), trained, create_graph=True, allow_unused=True)
penalty = sum((g.double() ** 2).sum() for g in run.whole(grads) if g is not None)
(run.total(out) + penalty).backward()
run.gradients()
""",
    """\
out = run.step()
run.total(out).backward(create_graph=True)
run.gradients()
""",
    """\
with torch.autocast('cpu', torch.bfloat16):
    out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
args, kwargs = run.batch()
out = run.call(*args, **kwargs, nonsense=3)
run.total(out).backward()
run.gradients()
""",
    """\
args, kwargs = run.batch()
out = run.call(*args, torch.ones(2), **kwargs)
run.total(out).backward()
run.gradients()
""",
    """\
args, kwargs = run.batch()
out = run.call(*args[1:], **kwargs)
run.total(out).backward()
run.gradients()
""",
    """\
args, kwargs = run.batch()
kwargs = {k: v * 2 for k, v in kwargs.items()}
out = run.call(*args, **kwargs)
run.total(out).backward()
run.gradients()
""",
    """\
args, kwargs = run.batch()
kwargs = dict(reversed(kwargs.items()))
out = run.call(*args, **kwargs)
run.total(out).backward()
run.gradients()
""",
    """\
args, kwargs = run.batch()
out = run.call(*args)
run.total(out).backward()
run.gradients()
""",
    """\
args, kwargs = run.batch()
args = [run.other(a) for a in args]
out = run.call(*args, **kwargs)
run.total(out).backward()
run.gradients()
""",
    """\
args, kwargs = run.batch()
args = [run.requiring(a) for a in args]
out = run.call(*args, **kwargs)
run.total(out).backward()
run.gradients()
run.look('grads', [getattr(a, 'grad', None) for a in args])
""",
    """\
args, kwargs = run.batch()
out = run.call(*args, **kwargs)
run.call(*args, **kwargs)
run.total(out).backward()
run.gradients()
""",
    """\
args, kwargs = run.batch()
out = run.call(*args, **kwargs)
for a in args:
    a.zero_() if isinstance(a, torch.Tensor) else None
run.total(out).backward()
run.gradients()
""",
    """\
for name, value in list(vars(run.model).items()):
    if name[:1] == 'a' and type(value) in (int, float):
        setattr(run.model, name, value + 1)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
out = run.step()
with torch.no_grad():
    for p in run.model.parameters():
        p.mul_(0.5)
run.total(out).backward()
run.gradients()
""",
    """\
for p in list(run.model.parameters())[:1]:
    p.requires_grad_(False)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
for p in run.model.parameters():
    p.requires_grad_(True)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
run.look('seen', [])
for p in run.model.parameters():
    if p.requires_grad:
        p.register_hook(lambda g: g * 2)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
state = {k: v.clone() for k, v in run.model.state_dict().items()}
optimizer = run.optimizer('sgd')
run.total(run.step()).backward()
optimizer.step()
run.model.load_state_dict(state)
run.state()
run.step()
""",
    """\
run.total(run.step()).backward()
run.model.zero_grad()
run.gradients()
run.total(run.step()).backward()
run.gradients()
""",
    """\
run.total(run.step()).backward()
run.model.zero_grad(set_to_none=False)
run.gradients()
run.total(run.step()).backward()
run.gradients()
""",
    """\
with torch.no_grad():
    out = run.step()
with torch.enable_grad():
    out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
run.model.to(torch.bfloat16)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
run.model.register_forward_hook(lambda module, args, result: None)
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
out = run.model.forward
run.look('forward', callable(out))
out = run.step()
run.total(out).backward()
run.gradients()
""",
    """\
with torch.set_grad_enabled(False):
    run.step()
run.gradients()
""",
    """\
out = run.step()
out = torch.utils._pytree.tree_map(lambda t: t * 1 if isinstance(t, torch.Tensor) else t, out)
del run.model
run.look('out', out)
""",
    """\
import copy
twin = copy.deepcopy(run.model)
out = run.step()
run.total(out).backward()
run.gradients()
run.look('twin', [p.grad is None for p in twin.parameters()])
""",
)
"""What autoshard may refuse, or one process does; rare, so that most programs run."""

WITHOUT_GRADIENT = (
    """\
run.step()
""",
    """\
run.step()
run.step()
""",
    """\
with torch.no_grad():
    run.step()
""",
    """\
with torch.inference_mode():
    run.step()
""",
    """\
run.model.eval()
run.step()
""",
)


def training(w: Writer, trains: bool) -> tuple[str, ...]:
    """The body of ``train``: one or two rounds, and what the state is at the end.

    Args:
        trains: whether some result wants a gradient; where none does, a backward is rare, as it only raises.
    """
    rounds = []
    for _ in range(w.integer(1, 2)):
        kind = w.integer(0, 99)
        if not trains and kind < 92:
            rounds.append(w.pick(WITHOUT_GRADIENT))
        elif kind < 72:
            rounds.append(w.pick(ORDINARY))
        elif kind < 89:
            optimizer = w.pick(("sgd", "momentum", "adamw", "adamw-foreach"))
            times, zero = w.integer(1, 3), w.pick(("", "set_to_none=False"))
            rounds.append(OPTIMIZED.format(kind=optimizer, times=times, zero=zero))
        else:
            rounds.append(w.pick(UNUSUAL))
    if any("checkpoint" in line for line in (*w.setup, *w.forward)):
        # one process computes a checkpointed part again with the parameters that the module has by then
        rounds = [text.replace("with_other_parameters", "directly") for text in rounds]
    return (*(line for text in rounds for line in text.splitlines()), "run.state()")
