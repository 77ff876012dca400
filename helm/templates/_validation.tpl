{{/* What no schema can say: values that do not fit together, each with what to do about it. */}}

{{- define "topwork.validate" -}}
{{- $topwork := .Values.topwork }}
{{- if not (or .Values.apiKeys.secretName $topwork.anonymous $topwork.oidc_issuer) }}
{{- fail "apiKeys.secretName: the service can be reached by others, and nobody has a key: name a Secret with the file of keys, set topwork.oidc_issuer, or set topwork.anonymous to true" }}
{{- end }}
{{- if and .Values.apiKeys.secretName $topwork.anonymous }}
{{- fail "topwork.anonymous: apiKeys.secretName asks for keys: take one of the two" }}
{{- end }}
{{- if and .Values.tokenRules.configMapName (not $topwork.oidc_issuer) }}
{{- fail "tokenRules.configMapName: rules are for the tokens of an issuer: set topwork.oidc_issuer" }}
{{- end }}
{{- $monitoring := .Values.monitoring }}
{{- if and $monitoring.serviceMonitor.enabled (or .Values.apiKeys.secretName $topwork.oidc_issuer) (not $monitoring.apiKey.secretName) }}
{{- fail "monitoring.apiKey.secretName: with apiKeys metrics need a key: name a Secret, in this namespace, that holds one with the scope metrics" }}
{{- end }}
{{- include "topwork.validateSource" (dict "name" "model" "values" .Values.model) }}
{{- include "topwork.validateSource" (dict "name" "adapters" "values" .Values.adapters) }}
{{- $kernels := .Values.kernelCache }}
{{- if and (eq $kernels.source "hostPath") (not $kernels.hostPath) }}
{{- fail "kernelCache.hostPath: kernelCache.source is hostPath, so say which directory" }}
{{- end }}
{{- if and (ne $kernels.source "none") (ne $topwork.device "cuda") }}
{{- fail (printf "kernelCache.source: kernels are compiled on GPUs, and topwork.device is %s: leave it none" $topwork.device) }}
{{- end }}
{{- if and (eq .Values.model.source "hub") (not .Values.model.hubId) }}
{{- fail "model.hubId: model.source is hub, so say which model" }}
{{- end }}
{{- if and (ne .Values.model.source "hub") .Values.model.hubId }}
{{- fail (printf "model.hubId: model.source is %s; hub ids need source hub" .Values.model.source) }}
{{- end }}
{{- if and .Values.adapters.watch (eq .Values.adapters.source "none") }}
{{- fail "adapters.watch: adapters.source is none, so there is nothing to watch" }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.parentRefs: a route belongs to a Gateway: name it" }}
{{- end }}
{{- include "topwork.validateGracePeriod" . }}
{{- if eq .Values.mode "rayservice" }}
{{- include "topwork.validateRay" . }}
{{- else }}
{{- include "topwork.validateDeployment" . }}
{{- end }}
{{- end }}

{{- define "topwork.validateGracePeriod" -}}
{{- $own := ternary 35 10 (eq .Values.mode "rayservice") }}
{{- $drain := add $own (float64 (default 30 .Values.topwork.drain_timeout) | ceil | int) }}
{{- if le (int .Values.terminationGracePeriodSeconds) (int $drain) }}
{{- fail (printf "terminationGracePeriodSeconds: %d is not more than topwork.drain_timeout and %d s beside it, %d together" (int .Values.terminationGracePeriodSeconds) $own $drain) }}
{{- end }}
{{- end }}

{{- define "topwork.validateSource" -}}
{{- if and (eq .values.source "hostPath") (not .values.hostPath) }}
{{- fail (printf "%s.hostPath: %s.source is hostPath, so say which directory" .name .name) }}
{{- end }}
{{- if and (eq .values.source "objectStore") (not .values.objectStore.source) }}
{{- fail (printf "%s.objectStore.source: %s.source is objectStore, so say what to copy: REMOTE:BUCKET/PATH" .name .name) }}
{{- end }}
{{- if and (eq .values.source "image") (not .values.image.reference) }}
{{- fail (printf "%s.image.reference: %s.source is image, so say which artifact" .name .name) }}
{{- end }}
{{- end }}

{{- define "topwork.validateRay" -}}
{{- $taken := list 6379 8080 8265 8404 8500 9101 10001 44217 44227 52365 }}
{{- if has (int .Values.service.port) $taken }}
{{- fail (printf "service.port: %d is a port of Ray's in the same pods: take another" (int .Values.service.port)) }}
{{- end }}
{{- $tp := int (default 1 .Values.topwork.tp) }}
{{- $perHost := int .Values.scheduler.ranksPerHost }}
{{- if gt $perHost 0 }}
{{- if ne 0 (mod $tp $perHost) }}
{{- fail (printf "scheduler.ranksPerHost: %d does not divide topwork.tp, which is %d" $perHost $tp) }}
{{- end }}
{{- end }}
{{- $replicas := int (default 1 .Values.topwork.replicas) }}
{{- $most := int (default $replicas .Values.topwork.max_replicas) }}
{{- if lt $most $replicas }}
{{- fail (printf "topwork.max_replicas: %d is less than topwork.replicas, which is %d" $most $replicas) }}
{{- end }}
{{- if and (gt $most $replicas) (not .Values.ray.autoscaler.enabled) }}
{{- fail "topwork.max_replicas: more schedulers need more pods, which ray.autoscaler.enabled makes" }}
{{- end }}
{{- $ft := .Values.ray.faultTolerance }}
{{- if and (eq $ft.backend "redis") (not $ft.redis.address) }}
{{- fail "ray.faultTolerance.redis.address: ray.faultTolerance.backend is redis, so say where it is" }}
{{- end }}
{{- $upgrade := .Values.ray.upgrade }}
{{- if and .Values.topwork.adapter_state (ne $upgrade.type "None") }}
{{- fail (printf "topwork.adapter_state: one adapter pool at a time has this file, and ray.upgrade.type %s runs two clusters beside each other: take None" $upgrade.type) }}
{{- end }}
{{- if eq $upgrade.type "NewClusterWithIncrementalUpgrade" }}
{{- if not $upgrade.gatewayClassName }}
{{- fail "ray.upgrade.gatewayClassName: an incremental upgrade moves requests by a Gateway: name its class" }}
{{- end }}
{{- if or .Values.ingress.enabled .Values.httpRoute.enabled }}
{{- fail "ray.upgrade.type: KubeRay makes Gateway and route of an incremental upgrade itself: turn ingress.enabled and httpRoute.enabled off" }}
{{- end }}
{{- end }}
{{- if or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled }}
{{- fail "autoscaling: it is for mode deployment; with rayservice, Serve scales from topwork.replicas to topwork.max_replicas" }}
{{- end }}
{{- end }}

{{- define "topwork.validateDeployment" -}}
{{- $tp := int (default 1 .Values.topwork.tp) }}
{{- $perHost := int .Values.scheduler.ranksPerHost }}
{{- if and (gt $perHost 0) (ne $perHost $tp) }}
{{- fail (printf "scheduler.ranksPerHost: in mode deployment all %d ranks are in one pod; take 0" $tp) }}
{{- end }}
{{- if or (gt (int (default 1 .Values.topwork.replicas)) 1) .Values.topwork.max_replicas }}
{{- fail "topwork.replicas: in mode deployment a pod is one server; take autoscaling.minReplicas and maxReplicas" }}
{{- end }}
{{- if and .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled }}
{{- fail "autoscaling.keda.enabled: KEDA makes a HorizontalPodAutoscaler itself: take one of the two" }}
{{- end }}
{{- if and .Values.autoscaling.keda.enabled (not .Values.autoscaling.keda.serverAddress) }}
{{- fail "autoscaling.keda.serverAddress: KEDA asks Prometheus: say where it is" }}
{{- end }}
{{- if lt (int .Values.autoscaling.maxReplicas) (int .Values.autoscaling.minReplicas) }}
{{- fail "autoscaling.maxReplicas: less than autoscaling.minReplicas" }}
{{- end }}
{{- end }}
