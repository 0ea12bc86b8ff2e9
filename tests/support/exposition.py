"""What /metrics says, as figures."""

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
"""Sorted by name."""
Samples = dict[tuple[str, Labels], float]


def samples(text: str) -> Samples:
    """Every sample; none may occur twice."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found
