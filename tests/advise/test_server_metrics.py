"""Counters of a server, and its work between two scrapes."""

import pytest

from kvtrie.advise.server_metrics import read_counters, scrape, traffic_of
from kvtrie.errors import ConfigError

VLLM = """# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 200.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1100.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 300.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 2.5
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 700.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="513",sliding_window="None"} 1.0
vllm:e2e_request_latency_seconds_bucket{le="0.3",model_name="m"} nan
"""
SGLANG = """sglang:prompt_tokens_total{model_name="m"} 50.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 20.0
sglang:max_total_num_tokens{model_name="m"} 4096.0
"""


def test_counters_of_vllm():
    assert read_counters(VLLM) == {
        "prompt_tokens": 1200,
        "queries": 1100,
        "hits": 300,
        "prefill_s": 2.5,
        "computed": 700,
        "num_gpu_blocks": 513,
        "block_size": 16,
    }


def test_counters_of_sglang():
    assert read_counters(SGLANG) == {"prompt_tokens": 50, "hits": 20, "gpu_tokens": 4096}


def test_traffic_is_the_difference():
    before, after = {"prompt_tokens": 100.0, "queries": 90.0}, read_counters(VLLM)
    traffic = traffic_of(before, after)
    assert traffic is not None
    assert traffic.prompt_tokens == 1100
    assert traffic.gpu_hits == pytest.approx(300 / 1010)
    assert traffic.token_s == pytest.approx(2.5 / 700)


def test_no_prompts_are_no_traffic():
    assert traffic_of({"prompt_tokens": 3.0}, {"prompt_tokens": 3.0}) is None


def test_a_counter_that_fell_is_named():
    with pytest.raises(ConfigError, match="prompt_tokens of the metrics fell from 9 to 3"):
        traffic_of({"prompt_tokens": 9.0}, {"prompt_tokens": 3.0})


def test_several_models_are_refused():
    with pytest.raises(ConfigError, match="several models, m, n"):
        read_counters(VLLM + 'vllm:prompt_tokens_total{model_name="n"} 1\n')


def test_metrics_of_another_program_are_refused():
    with pytest.raises(ConfigError, match="has no vllm:prompt_tokens_total"):
        read_counters("process_cpu_seconds_total 3\n")


@pytest.mark.parametrize("url", ["ftp://host/metrics", "host:8000", "http://127.0.0.1:1/metrics"])
def test_an_address_without_metrics_is_refused(url):
    with pytest.raises(ConfigError, match="metrics"):
        scrape(url)
