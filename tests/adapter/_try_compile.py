import sys, torch, dataclasses
from tests.support.pool import Pool
from tests.support.models.diffusers_tiny import MODELS, flat
from tests.adapter.test_generic import body_of, error
from tests.support.foreign import StayDouble
import os; DYN = {"1": True, "0": False}.get(os.environ.get("DYN")); LAY = {"num_layers": 12, "num_single_layers": 12, "n_layers": 12}
def run(rank, world, device, name, backend):
    torch._dynamo.reset()
    tiny = MODELS[name]
    tiny = dataclasses.replace(tiny, config={k: LAY.get(k, v) for k, v in tiny.config.items()})
    module = tiny.build()
    a = tiny.arguments()
    with torch.no_grad(): truth = flat(module(**a, return_dict=False))
    import time; t=time.time()
    if getattr(module, "_repeated_blocks", None):
        module.compile_repeated_blocks(fullgraph=True, backend=backend, dynamic=DYN)
    else:
        for block in module.transformer_blocks: block.compile(fullgraph=True, backend=backend, dynamic=DYN)
    body = body_of(module, world, device, "ulysses", "collective")
    outs = [error(flat(body(tiny.arguments())), truth) for _ in range(3)]
    from torch._dynamo.utils import counters
    return outs, time.time()-t, dict(counters["stats"])
def main():
    torch.set_num_threads(1)
    pool = Pool("cpu")
    for n in sys.argv[2:]:
        try: print(n, pool.run(2, __import__("tests.adapter._try_compile", fromlist=["run"]).run, n, sys.argv[1]), flush=True)
        except Exception as e: print(n, "FAIL", str(e)[-3500:], flush=True)
    pool.close()
if __name__ == "__main__": main()
