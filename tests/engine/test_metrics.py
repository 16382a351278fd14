"""The series behind /metrics: values, restarts of the engine, and several engines in one process."""

from prometheus_client.parser import text_string_to_metric_families

from izh.engine.metrics import Metrics
from izh.request import EngineStats


def values(metrics: Metrics) -> dict[str, float]:
    """Every sample by name; those with a reason as name/reason."""
    samples = [s for family in text_string_to_metric_families(metrics.render().decode()) for s in family.samples]
    return {
        "/".join([s.name, *([s.labels["finished_reason"]] if "finished_reason" in s.labels else [])]): s.value
        for s in samples
        if s.labels.get("model_name") == "m" and "le" not in s.labels
    }


def test_gauges_follow_the_last_step():
    metrics = Metrics("m")
    metrics.stats(EngineStats(num_running=3, num_waiting=2, kv_usage=0.5))
    metrics.stats(EngineStats(num_running=1, num_waiting=0, kv_usage=0.25))
    got = values(metrics)
    assert got["izh:num_requests_running"] == 1
    assert got["izh:num_requests_waiting"] == 0
    assert got["izh:kv_cache_usage_perc"] == 0.25


def test_totals_never_fall_when_the_engine_restarts():
    metrics = Metrics("m")
    for total in (10, 25, 25, 0, 7):  # the fourth reading comes from a new process
        metrics.stats(EngineStats(prefix_query_tokens=total, prefix_hit_tokens=total // 5, num_preempted=total))
    got = values(metrics)
    assert got["izh:prefix_cache_queries_total"] == 32
    assert got["izh:prefix_cache_hits_total"] == 6
    assert got["izh:num_preemptions_total"] == 32


def test_ended_requests():
    metrics = Metrics("m")
    metrics.first_token(0.5, 0.125)
    metrics.finished("stop", 10, 5, 2.0, 0.25)
    metrics.finished("length", 10, 1, 1.0, None)
    metrics.finished("abort", 4, 2, 9.0, 0.5)
    metrics.finished("error", 100, 0, 9.0, None)
    got = values(metrics)
    assert {name: got[f"izh:request_success_total/{name}"] for name in ("stop", "length", "abort", "error")} == {
        "stop": 1,
        "length": 1,
        "abort": 1,
        "error": 1,
    }
    assert got["izh:prompt_tokens_total"] == 24
    assert got["izh:generation_tokens_total"] == 8
    assert got["izh:e2e_request_latency_seconds_sum"] == 3.0
    assert got["izh:time_per_output_token_seconds_count"] == 1
    assert got["izh:time_to_first_token_seconds_sum"] == 0.5
    assert got["izh:request_queue_time_seconds_sum"] == 0.125


def test_two_engines_share_nothing():
    first, second = Metrics("m"), Metrics("m")
    first.finished("stop", 1, 1, 1.0, None)
    assert "izh:request_success_total/stop" not in values(second)
