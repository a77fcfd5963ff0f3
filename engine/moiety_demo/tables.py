"""Tables of an evaluation for a terminal."""

from rich.console import Group
from rich.table import Table

from moiety_demo.evaluate import DomainResult, EvaluationReport

NUM_TOP_EXPERTS = 3
SHADES = " ·░▒▓█"


def render_report(report: EvaluationReport) -> Group:
    """Return the accuracy per domain, and a map of expert use per domain for every layer."""
    num_layers = len(report.specialisation.total_variation)
    return Group(_accuracy(report), *(_expert_use(report, layer) for layer in range(num_layers)))


def _accuracy(report: EvaluationReport) -> Table:
    table = Table(title="Exact answers to held-out prompts")
    for heading in ("domain", "exact", "prompts", "accuracy", "weakest kind"):
        table.add_column(heading, justify="left" if heading in ("domain", "weakest kind") else "right")
    for name, result in report.domains.items():
        table.add_row(name, str(result.num_exact), str(result.num_prompts), f"{result.accuracy:.1%}", _weakest(result))
    return table


def _weakest(result: DomainResult) -> str:
    kind, counts = min(result.kinds.items(), key=lambda item: item[1].num_exact / item[1].num_prompts)
    return f"{kind} {counts.num_exact}/{counts.num_prompts}"


def _expert_use(report: EvaluationReport, layer: int) -> Table:
    """Return one row per domain: its share of each expert as shades (█ is the layer's highest), and its top experts."""
    information = report.specialisation.mutual_information_bits[layer]
    distance = report.specialisation.total_variation[layer]
    title = f"Layer {layer}: {information:.2f} bits about the domain, total variation {distance:.2f}"
    table = Table(title=title)
    shares = {name: _shares(result.expert_counts[layer]) for name, result in report.domains.items()}
    highest = max(max(row) for row in shares.values())
    num_experts = len(next(iter(shares.values())))
    table.add_column("domain")
    table.add_column(f"experts 0 to {num_experts - 1}", no_wrap=True)
    table.add_column("top experts")
    for name, row in shares.items():
        shades = "".join(SHADES[round(share / highest * (len(SHADES) - 1))] * 2 for share in row)
        top = sorted(range(len(row)), key=lambda expert: -row[expert])[:NUM_TOP_EXPERTS]
        table.add_row(name, shades, ", ".join(f"{expert} ({row[expert]:.0%})" for expert in top))
    return table


def _shares(counts: list[int]) -> list[float]:
    total = sum(counts)
    return [count / total for count in counts]
