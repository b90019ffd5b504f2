# The service for other machines. The image holds no token and no data: pass the token when it starts, and put a proxy with TLS in front.
#
#   docker build --build-arg TORCH_INDEX=ADDRESS -t medtokenbudget .    ADDRESS: PyTorch's package index of CPU wheels
#   docker run -p 8765:8765 -e MTB_TOKEN -v ./model:/model:ro medtokenbudget /model
FROM python:3.12-slim-bookworm

# Without it pip takes the default wheels, which on x86 are several GB larger.
ARG TORCH_INDEX=""

WORKDIR /app
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src
RUN env ${TORCH_INDEX:+PIP_INDEX_URL="$TORCH_INDEX"} pip install --no-cache-dir -c constraints.txt torch torchvision \
    && pip install --no-cache-dir -c constraints.txt ".[serve]" \
    && useradd --create-home --uid 10001 mtb

USER 10001
EXPOSE 8765
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8765/healthz', timeout=4)"]
ENTRYPOINT ["mtb", "serve", "--host", "0.0.0.0"]
