"""OpenVINO's copy of the model, and what it computes in.

GenAI reads the GGUF file and builds its graph, but it rounds the zero points of Q4_1 to whole numbers, which changes
the weights by about a tenth. So its graph is kept, and its weights are replaced by the unpacked fp32 ones that the
other engines use; once, in the cache folder.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

# The graphs that GenAI writes beside the model. Prompts are token ids here, but the pipeline wants them.
TOKENIZER_GRAPHS = ("openvino_tokenizer", "openvino_detokenizer")
PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
# What carries nearly all of a forward's arithmetic.
HEAVY_LAYERS = ("FullyConnected", "PagedAttention")


class Refused(RuntimeError):
    """It cannot do what is asked on this machine; the message is all there is to say."""


def model_folder() -> Path:
    """Where the converted model lies."""
    from chairlift.cli.demo import demo_model_dir

    return demo_model_dir() / "openvino-fp32"


def plugin_settings(dtype: str) -> dict[str, str]:
    """How its CPU plugin is asked to compute: K and V in the run's dtype too (its default is 8-bit)."""
    precision = PRECISIONS[dtype]
    return {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}


def computes_in(dtype: str) -> str:
    """What its plugin says of the heavy layers when it has compiled the model as it is asked to, in words.

    Raises:
        Refused: It cannot compute in that type on this CPU, or would compute in another.
    """
    import openvino
    from openvino._offline_transformations import paged_attention_transformation

    core = openvino.Core()
    graph = core.read_model(model_folder() / "openvino_model.xml")
    paged_attention_transformation(graph)  # as the pipeline does
    able = ", ".join(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
    try:
        compiled = core.compile_model(graph, "CPU", plugin_settings(dtype))
    except RuntimeError as error:
        *_, why = str(error).strip().splitlines()
        raise Refused(f"its plugin refuses {dtype} on this CPU, where it knows {able}: {why.strip()}") from error
    found = Counter(
        (kind, node.get_rt_info()["runtimePrecision"].astype(str))
        for node in compiled.get_runtime_model().get_ordered_ops()
        if (kind := node.get_rt_info()["layerType"].astype(str)) in HEAVY_LAYERS
    )
    told = ", ".join(f"{count} {kind} in {precision}" for (kind, precision), count in sorted(found.items()))
    told += f", K and V in {compiled.get_property('KV_CACHE_PRECISION').to_string()}"
    if any(precision != PRECISIONS[dtype] for _, precision in found):
        raise Refused(f"asked for {dtype} it computes {told}; on this CPU its plugin knows {able}")
    return told


def convert_model() -> None:
    """Writes GenAI's own graph of the model with the unpacked fp32 weights in it, once."""
    import numpy as np
    import openvino
    import openvino_genai
    import torch
    from openvino import opset13

    from chairlift.cli.demo import WEIGHTS_NAME, load_demo

    target = model_folder()
    if target.exists():
        return
    model, _ = load_demo(torch.float32)
    left = {name: weight.detach().numpy() for name, weight in model.named_parameters() if weight.dim() == 2}

    with tempfile.TemporaryDirectory(dir=target.parent) as scratch_name:
        scratch = Path(scratch_name)
        packed = scratch / WEIGHTS_NAME  # GenAI writes its graph beside it
        packed.symlink_to(target.parent / WEIGHTS_NAME)
        openvino_genai.LLMPipeline(packed, "CPU", enable_save_ov_model=True)
        graph = openvino.Core().read_model(scratch / "openvino_model.xml")

        # A packed weight ends in: (codes - zero points) * scales, reshape to two dimensions, convert to fp32.
        unpacked = [
            node.output(0)
            for node in graph.get_ordered_ops()
            if node.get_type_name() == "Convert"
            and node.input_value(0).get_node().get_type_name() == "Reshape"
            and node.get_output_partial_shape(0).is_static
            and len(node.get_output_shape(0)) == 2
        ]
        if len(unpacked) != len(left):
            raise RuntimeError(f"the graph has {len(unpacked)} packed weights, the model {len(left)}")
        # The graph's weights have no names, so each is recognised by its values: though rounded, they are
        # far nearer to their own (a relative distance of 0.1) than to any other (1.0).
        rounded = openvino.compile_model(openvino.Model(unpacked, []), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({})
        for index, output in enumerate(unpacked):
            values = rounded[index]
            distances = {
                name: float(np.abs(weight - values).mean() / np.abs(values).mean())
                for name, weight in left.items()
                if weight.shape == values.shape
            }
            name = min(distances, key=distances.__getitem__)
            if distances[name] > 0.3:
                raise RuntimeError(f"no weight of the model is near number {index} of the graph: {distances[name]:.2f}")
            exact = opset13.constant(left.pop(name)).output(0)
            for user in output.get_target_inputs():
                user.replace_source_output(exact)
        graph.validate_nodes_and_infer_types()

        finished = scratch / "finished"
        finished.mkdir()
        openvino.save_model(graph, finished / "openvino_model.xml", compress_to_fp16=False)
        for stem in TOKENIZER_GRAPHS:
            for suffix in (".xml", ".bin"):
                (scratch / stem).with_suffix(suffix).rename(finished / f"{stem}{suffix}")
        finished.rename(target)
