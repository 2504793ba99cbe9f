# An OpenAI-compatible server on the CPU:
#
#   docker build -t stree-jax .
#   docker run --rm -p 127.0.0.1:8000:8000 stree-jax
#   docker run --rm -v "$PWD/models:/models:ro" -p 127.0.0.1:8000:8000 stree-jax \
#     serve --host 0.0.0.0 --model /models/NAME
#
# Other commands work too: docker run --rm stree-jax generate "def add(a, b):"

FROM python:3.13-slim AS build
# Debian's compiler for the CPU kernels, which choose their instructions at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python -m venv /opt/stree-jax \
    && /opt/stree-jax/bin/pip install --no-cache-dir '.[gguf,serve]'

FROM python:3.13-slim
COPY --from=build /opt/stree-jax /opt/stree-jax
RUN useradd --create-home --uid 1000 stree
USER 1000
WORKDIR /home/stree
ENV PATH="/opt/stree-jax/bin:$PATH" \
    PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --start-period=300s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["stree-jax"]
CMD ["serve", "--host", "0.0.0.0", "--model", "demo"]
