{{/* Parts of every pod. */}}

{{/* The environment that Ray needs in every container of a cluster: the only place that says it.
     Values are those of `topwork environment`. HAProxy's files lie where Serve puts them, in /tmp;
     its ports of statistics are for this pod alone. */}}
{{- define "topwork.rayEnvironment" -}}
- name: RAY_SERVE_ENABLE_HA_PROXY
  value: "1"
- name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD
  value: "0"
- name: RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP
  value: "0"
- name: RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE
  value: "1000"
- name: RAY_SERVE_LOG_TO_STDERR
  value: "0"
- name: RAY_SERVE_USE_GRPC_BY_DEFAULT
  value: "1"
- name: RAY_SERVE_PROXY_USE_GRPC
  value: "0"
- name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH
  value: "deploy.serving.router.middleware:middlewares"
- name: RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH
  value: "deploy.serving.haproxy.manager:install"
- name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S
  value: "2"
- name: RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S
  value: "30"
- name: RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S
  value: "2"
- name: RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S
  value: "8"
- name: RAY_SERVE_HAPROXY_NBTHREAD
  value: "1"
- name: RAY_SERVE_CONTROL_LOOP_INTERVAL_S
  value: "0.3"
- name: RAY_SERVE_METRICS_EXPORT_INTERVAL_MS
  value: "5000"
- name: RAY_SERVE_HAPROXY_STATS_PORT
  value: "8404"
- name: RAY_SERVE_HAPROXY_METRICS_PORT
  value: "9101"
{{- with pick .Values.topwork "max_connections_per_address" "trusted_proxy" "body_timeout" }}
- name: TOPWORK_FRONT_DOOR
  value: {{ toJson . | quote }}
{{- end }}
- name: RAY_SERVE_FALLBACK_PROXY_HTTP_PORT
  value: "8500"
- name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
  value: "1"
- name: RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S
  value: "1"
- name: RAY_worker_niceness
  value: "0"
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_AUTH_MODE
  value: token
- name: RAY_health_check_period_ms
  value: "1000"
- name: RAY_health_check_timeout_ms
  value: "2000"
- name: RAY_health_check_failure_threshold
  value: "4"
{{- if ne .Values.ray.faultTolerance.backend "off" }}
# Workers wait so long for a head that comes back.
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "600"
{{- end }}
{{- include "topwork.tlsEnvironment" . }}
{{- end }}

{{/* Environment of the container: dict "root" $ "flavour" "cuda". */}}
{{- define "topwork.environment" -}}
{{- if include "topwork.keepsKernels" . }}
- name: TRITON_CACHE_DIR
  value: /var/cache/topwork/kernels
{{- end }}
{{- with .root }}
# A container may run as a user without a name.
- name: HOME
  value: /home/topwork
- name: USER
  value: topwork
{{- if eq .Values.model.source "hub" }}
{{- with .Values.model.hubToken }}
{{- if .secretName }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .secretName | quote }}
      key: {{ .key | quote }}
{{- end }}
{{- end }}
{{- else }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Where a pod may run: dict "root" $ "group" .Values.router "component" "router". */}}
{{- define "topwork.placement" -}}
{{- with .group.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .group.topologySpread }}
topologySpreadConstraints:
  {{- range .group.topologySpread }}
  {{- $own := dict "labelSelector" (dict "matchLabels" (include "topwork.podSelector" $ | fromYaml)) }}
  - {{- toYaml (merge (deepCopy .) $own) | nindent 4 }}
  {{- end }}
{{- end }}
{{- with .group.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .group.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "topwork.podSelector" -}}
{{ include "topwork.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "topwork.podMetadata" -}}
labels:
  {{- include "topwork.podSelector" . | nindent 2 }}
  {{- with merge (deepCopy .group.podLabels) .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .group.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What stands in every pod's spec beside its containers. */}}
{{- define "topwork.podSpec" -}}
serviceAccountName: {{ include "topwork.serviceAccount" .root | quote }}
automountServiceAccountToken: {{ eq .component "head" | and .root.Values.ray.autoscaler.enabled | default false }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .root.Values.terminationGracePeriodSeconds }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with include "topwork.placement" . }}
{{ . }}
{{- end }}
{{- with include "topwork.initContainers" .root | trim }}
initContainers:
  {{- . | nindent 2 }}
{{- end }}
{{- /* Last, so that whoever includes this may add one. */}}
volumes:
  {{- include "topwork.volumes" . | trim | nindent 2 }}
{{- end }}

{{/* Resources, with a GPU for each rank of the pod: dict "root" $ "group" .Values.scheduler. */}}
{{- define "topwork.schedulerResources" -}}
{{- $resources := deepCopy .Values.scheduler.resources }}
{{- if eq .Values.topwork.device "cuda" }}
{{- $gpus := dict .Values.scheduler.gpuResource (include "topwork.ranksPerHost" . | int) }}
{{- $_ := set $resources "limits" (merge (default dict $resources.limits) $gpus) }}
{{- $_ := set $resources "requests" (merge (default dict $resources.requests) $gpus) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "topwork.container" -}}
image: {{ include "topwork.image" . | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
lifecycle:
  preStop:
    exec:
      {{- if .leaves }}
      # Serve starts elsewhere what it runs here, and hands streams over.
      command: [python3, -m, deploy.ray.leave, {{ sub .root.Values.terminationGracePeriodSeconds 20 | quote }}]
      {{- else }}
      # Until every endpoint has heard that this pod goes, it still answers.
      command: [sleep, "10"]
      {{- end }}
{{- /* Last, so that whoever includes this may add one. */}}
volumeMounts:
  {{- include "topwork.mounts" . | trim | nindent 2 }}
{{- end }}
