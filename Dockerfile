# The image that deployments/clusters/kubernetes.toml names, for pods of stages and of flows:
#   make wheel
#   docker build --tag registry.example.com/cosmos-rl-flows:0.1.0 .
FROM python:3.11-slim-bookworm
# A compiler for launch.compile.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 cosmos
COPY dist/cosmos_rl_flows-*.whl /tmp/
# uv, because pip's resolver may try versions of the dependencies for many minutes.
RUN pip install --no-cache-dir uv
RUN uv pip install --system --no-cache "$(echo /tmp/cosmos_rl_flows-*.whl)[kubernetes,tracking,web]" && rm /tmp/*.whl
USER cosmos
WORKDIR /home/cosmos
# No entry point: Kubernetes and Prefect give whole commands.
CMD ["cosmos-flows", "--help"]
