"""Removes every name and every metadata entry from an ONNX file; the computation stays.

    python tools strip IN OUT

Nodes and values become n0, n1, … and v0, v1, … in order of appearance. Graph inputs and outputs are renamed too and keep
their order. Metadata, doc strings, value_info, symbolic dimension names (d0, d1, …) and producer are removed. External data
references stay. An analysis that finds structure in such a file finds it in the dataflow.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from tools.lib import options


class Names:
    """New names in order of first appearance. The empty name (an absent optional operand) stays empty."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.new: dict[str, str] = {"": ""}

    def __getitem__(self, old: str) -> str:
        return self.new.setdefault(old, f"{self.prefix}{len(self.new) - 1}")


def strip_graph(graph: onnx.GraphProto, values: Names, dims: Names, counter: list[int]) -> None:
    """Renames in place. Subgraphs share the names of the graph around them, so captures stay captures."""
    del graph.value_info[:]
    del graph.quantization_annotation[:]
    del graph.metadata_props[:]
    graph.doc_string = ""
    graph.name = "g"
    for value in [*graph.input, *graph.output]:
        value.name = values[value.name]
        value.doc_string = ""
        del value.metadata_props[:]
        for dim in value.type.tensor_type.shape.dim:
            dim.ClearField("denotation")
            if dim.HasField("dim_param"):
                dim.dim_param = dims[dim.dim_param]
    for tensor in graph.initializer:
        tensor.name = values[tensor.name]
        tensor.doc_string = ""
        del tensor.metadata_props[:]
    if graph.sparse_initializer:
        raise ValueError("sparse initializers are not handled")
    for node in graph.node:
        node.name = f"n{counter[0]}"
        counter[0] += 1
        node.doc_string = ""
        del node.metadata_props[:]
        node.input[:] = [values[name] for name in node.input]
        node.output[:] = [values[name] for name in node.output]
        for attribute in node.attribute:
            attribute.doc_string = ""
            if attribute.type == onnx.AttributeProto.TENSOR:
                attribute.t.name = ""
            elif attribute.type == onnx.AttributeProto.GRAPH:
                strip_graph(attribute.g, values, dims, counter)
            elif attribute.type == onnx.AttributeProto.GRAPHS:
                for inner in attribute.graphs:
                    strip_graph(inner, values, dims, counter)


def strip(model: onnx.ModelProto) -> onnx.ModelProto:
    """Removes names and metadata in place and returns the model. Local functions lose metadata but keep their names."""
    model.producer_name = model.producer_version = model.domain = model.doc_string = ""
    del model.metadata_props[:]
    for function in model.functions:
        function.doc_string = ""
        del function.metadata_props[:]
        del function.value_info[:]
        for node in function.node:
            node.doc_string = ""
            del node.metadata_props[:]
    strip_graph(model.graph, Names("v"), Names("d"), [0])
    return model


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("source", type=Path, metavar="IN")
    parser.add_argument("target", type=Path, metavar="OUT")
    args = parser.parse_args()
    model = strip(onnx.load(args.source, load_external_data=False))
    args.target.write_bytes(model.SerializeToString(deterministic=True))
    return 0
